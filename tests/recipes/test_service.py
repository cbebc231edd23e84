"""The recipe `service`: an OpenAI Agents SDK agent behind FastAPI, trained over HTTP with a trace id."""

import contextlib
import doctest
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.prepare import python_of
from recipes.service import data, reward
from recipes.service import train as starting
from strop.config import load
from strop.errors import TaskError
from strop.types import Task
from tests.recipes.trained import ROOT, needs, train

GSM8K = Path(__file__).parents[2] / "../shared/data/math/gsm8k"
HERE = ROOT / "recipes" / "service"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def ports() -> tuple[str, str]:
    """Settings that put service and gateway where nobody else is."""
    return f"agent=http://127.0.0.1:{free_port()}/solve?agent=nano", f"gateway.port={free_port()}"


# --- quick ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_configurations(size: str) -> None:
    config = load(toml=HERE / f"{size}.toml")
    assert config.agent.startswith("http://127.0.0.1:9600/solve")
    assert config.gateway.port == 9601
    for spec in (config.reward, config.tasks):
        path, _, name = str(spec).partition(":")
        assert hasattr({"reward": reward, "data": data}[Path(path).stem], name)


def test_its_words_are_true() -> None:
    for module in (data, reward):
        assert doctest.testmod(module).failed == 0


def test_made_problems_have_the_shape_of_real_ones() -> None:
    rows = data.rows("made")["test"]
    assert rows[0].keys() == {"question", "answer"}
    tasks = data.tasks("made")
    assert {task.split for task in tasks} == {"train", "test"}
    assert len({task.id for task in tasks}) == len(tasks)
    assert all(task.data["results"] == [task.data["answer"]] for task in tasks)


def test_easy_problems_only(tmp_path: Path) -> None:
    rows = [
        {"question": "Easy?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        {"question": "Long?" * 40, "answer": "1+1=<<1+1=2>>2\n#### 2"},
        {"question": "Hard?", "answer": "<<1+1=2>>2 <<2+1=3>>3 <<3+1=4>>4\n#### 4"},
        {"question": "Unmarked?", "answer": "Who knows.\n#### 4"},
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(data.tasks(str(tmp_path))) == 8
    assert [task.id for task in data.tasks(str(tmp_path), steps=2, letters=100)] == ["train-0", "test-0"]
    with pytest.raises(TaskError, match="stated=True"):  # none of their questions has a number in it
        data.tasks(str(tmp_path), stated=True)
    with pytest.raises(TaskError, match="allow more"):
        data.tasks(str(tmp_path), steps=1, letters=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "?"}', "train: row 0 has no question and answer that are text"),
        ('{"question": "?", "answer": 7}', "row 0 has no question and answer"),
        ('{"question": ', "train.jsonl, line 1"),
        ("", "no tasks there"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(TaskError, match=says):
        data.tasks(str(tmp_path))


def test_lines_end_where_json_says(tmp_path: Path) -> None:
    row = '{"question": "One\u2028two?", "answer": "<<1+1=2>>2\\n#### 2"}'
    (tmp_path / "train.jsonl").write_text(f"\ufeff{row}\n\n{row}\n")
    assert [task.data["question"] for task in data.tasks(str(tmp_path))] == ["One\u2028two?"] * 2


def test_data_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TaskError, match="give --data PATH"):
        data.tasks("nobody/has-this")


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not here")
def test_gsm8k() -> None:
    assert len(data.tasks(str(GSM8K))) == 7473 + 1319
    easy = data.tasks(**load(toml=HERE / "gpu.toml").tasks_args | {"data": str(GSM8K)})
    splits = [task.split for task in easy]
    assert (splits.count("train"), splits.count("test")) == (537, 89)
    for task in easy:
        assert reward.same(task.data["results"][-1], task.data["answer"])  # whoever calculates it all knows the answer


@pytest.mark.parametrize(
    ("question", "solution", "stated"),
    [
        ("A pen costs $1,200.50 and a cap .5. Both?", "<<1200.50+.5=1201>>1201\n#### 1,201", True),
        ("Bo has 3 boxes of 12 and loses 5.", "<<3*12=36>>36 <<36-5=31>>31\n#### 31", True),
        ("Bo has 3 boxes of 12 and loses 5.", "<<3*12-5=31>>31\n#### 31", False),  # three numbers at once
        ("Bo has twice 12.", "<<2*12=24>>24\n#### 24", False),  # said in words
        ("Bo has 3 boxes of 12 and loses 5.", "<<3*12=36>>36 minus 5\n#### 31", False),  # not all is marked
        ("Bo has 3 boxes of 12.", "36\n#### 36", False),
    ],
)
def test_what_is_stated(question: str, solution: str, stated: bool) -> None:
    assert data.is_stated({"question": question, "answer": solution}) is stated


@pytest.mark.parametrize(
    ("answer", "results", "expected"),
    [
        ("The answer is 72.", ["24", "72"], 1.0),
        ("The answer is $72.00.", [], 1.0),
        ("The answer is 24.", ["24", "72.0"], 0.6),
        ("It is 24 or so", ["24"], 0.35),
        ("no idea", ["3"], 0.1),
        ("", ["24", "72"], 0.0),
        (" \n", ["24", "72"], 0.0),
        ("no idea", [], 0.0),
    ],
)
def test_reward(answer: str, results: list[str], expected: float) -> None:
    task = Task(id="t", data={"question": "?", "results": ["24", "72"], "answer": "72"})
    solved = {"answer": answer, "calculations": [{"expression": "?", "steps": [result]} for result in results]}
    assert reward.score(task, solved)["reward"] == pytest.approx(expected)


# --- in its own environment -----------------------------------------------------------------------------------------


@pytest.mark.frameworks
@needs("service")
def test_no_strop_in_the_service() -> None:
    found = "import importlib.util as u; print(u.find_spec('agents') is not None, u.find_spec('strop'))"
    said = subprocess.run([python_of("service"), "-I", "-c", found], capture_output=True, text=True, check=True)
    assert said.stdout == "True None\n"


@pytest.mark.frameworks
@needs("service")
def test_the_calculator_takes_what_models_write() -> None:
    script = """if True:
        import doctest, sys
        sys.path.insert(0, sys.argv[1])
        import agent
        assert doctest.testmod(agent).failed == 0
        odd = ["__import__('os')", "1e999 * 2", "(" * 900, "1 + " * 60 + "1"]
        for wrong in ["", "x", "1 +", "1 / 0", "True + 1", "9 ** 9 ** 9", *odd]:
            done = agent.calculate(wrong)
            assert done.result.startswith("error: ") and not done.steps, (wrong, done)
        assert agent.calculate("1,200 / 7").result == "171.428571"
        assert agent.calculate("2 + 3 * (7 - 1)").steps == ["6", "18", "20"]
    """
    command = [python_of("service"), "-c", script, HERE]
    done = subprocess.run(command, env={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.frameworks
@needs("service")
def test_it_trains(tmp_path: Path, ports: tuple[str, str]) -> None:
    small = ("loop.steps=3", "loop.groups=8", "loop.group_size=8", "loop.eval_splits=[]")
    trained = train("service", tmp_path, *ports, *small)
    rollouts = trained.rollouts
    assert len(rollouts) == 3 * 8 * 8
    assert all(rollout.status == "succeeded" for rollout in rollouts)

    # Every rollout is one conversation, each turn of which goes on from the one before token for token.
    turns = [trained.turns(rollout) for rollout in rollouts]
    branches = trained.check()
    assert branches == {None: sum(map(len, turns))}
    assert {turn.agent for several in turns for turn in several} == {"main"}
    assert any(len(several) == 2 for several in turns)
    for several in turns:
        assert [turn.parent for turn in several] == [None, *(turn.id for turn in several[:-1])]

    # One client asked for all of them, by the trace id alone, for a model of another name.
    assert {turn.requested["model"] for several in turns for turn in several} == {"gpt-4.1-mini"}

    worth = set()
    for rollout, several in zip(rollouts, turns, strict=True):
        rewards = {one.name: one for one in rollout.rewards}
        assert rewards.keys() == {"reward", "right", "calculated"}
        assert all((one.turn, one.agent) == (None, None) for one in rewards.values())  # of the whole rollout
        calls = [turn for turn in several if turn.finish == "tool_calls"]
        assert rewards["calculated"].value <= len(calls)
        if rewards["right"].value:
            assert rollout.task.data["answer"] in several[-1].answer["content"]
        worth.add(rewards["reward"].value)
    assert len(worth) > 1

    # What carries loss is what the model said: the call and the answer, nothing of question, tool list or result.
    used = next(rollout for rollout, several in zip(rollouts, turns, strict=True) if len(several) == 2)
    (_, call), (_, answer) = trained.loss_text(used.id)
    assert call.startswith("<tool_call>")
    assert call.endswith("</tool_call><|im_end|>")
    assert "<|im_start|>" not in call + answer


@pytest.mark.frameworks
@needs("service")
def test_the_service_ends_with_the_run(tmp_path: Path, ports: tuple[str, str]) -> None:
    """However the command ends, and also when it is killed; and a run that goes on has it again."""
    sets = [f"--set={one}" for one in (*ports, "loop.steps=1000")]
    command = [sys.executable, str(HERE / "train.py"), "--config", str(HERE / "laptop.toml"), *sets, "--json"]
    health = ports[0].removeprefix("agent=").replace("/solve?agent=nano", "/health")
    resume = [sys.executable, str(HERE / "train.py"), "--json", "--resume"]
    for end, begin in ((signal.SIGTERM, [*command, "--folder"]), (signal.SIGKILL, resume)):
        folder = tmp_path / "run"
        run = subprocess.Popen([*begin, str(folder)], cwd=ROOT, start_new_session=True)
        try:
            wait_for(lambda folder=folder: (folder / "address.json").exists() and starting.answers(health))
            run.send_signal(end)
            run.wait(60)
            wait_for(lambda: not starting.answers(health))
        finally:
            stop_group(run.pid)


@pytest.mark.frameworks
@needs("service")
def test_a_taken_port_is_said(tmp_path: Path, ports: tuple[str, str]) -> None:
    command = [sys.executable, str(HERE / "train.py"), "--config", str(HERE / "laptop.toml"), f"--set={ports[1]}"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # bound, and nobody listens: nothing answers there, and nothing can
        taken = f"--set=agent=http://127.0.0.1:{other.getsockname()[1]}/solve"
        done = subprocess.run(
            [*command, taken, "--folder", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert "the service did not start" in done.stderr
    assert "address already in use" in done.stderr


@pytest.mark.frameworks
@needs("service")
def test_a_task_without_a_trace_id_is_refused(ports: tuple[str, str], tmp_path: Path) -> None:
    url = ports[0].removeprefix("agent=")
    with starting.serving(python_of("service"), url, "http://127.0.0.1:9/v1", tmp_path / "log"):
        body = json.dumps({"task": {"data": {"question": "?"}}}).encode()
        asked = urllib.request.Request(url, body, {"content-type": "application/json"})
        with pytest.raises(urllib.request.HTTPError) as refused:
            urllib.request.urlopen(asked)
        with refused.value as said:
            assert said.code == 422
            assert b"trace_id" in said.read()


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.1)


def stop_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
