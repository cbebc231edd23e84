"""What users get wrong: one sentence with the fix in it, the right exit code, no traceback, and nothing lost."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from strop.run.history import read
from tests import runs
from tests.limits import stretch

AGENTS = """
import math

def fine(task, llm):
    llm.client().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    return 1.0

def raises(task, llm):
    fine(task, llm)
    raise RuntimeError("the kitchen is closed")

def nan(task, llm):
    fine(task, llm)
    return math.nan

def text(task, llm):
    return "very good"

def hangs(task, llm):
    import time
    time.sleep(600)

def elsewhere(task, llm):
    import openai
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)
    client.chat.completions.create(model="another", messages=[{"role": "user", "content": "hi"}])

def alone(task, llm):
    return float(task.id == "a")

def nothing(task, llm):
    fine(task, llm)

def other(task, llm):
    return {"score": 1.0}

def slow(task, llm):
    import time
    fine(task, llm)
    time.sleep(1.5)
    return 1.0

def second_group_raises(task, llm):
    if llm.rollout.startswith("g000001"):
        raise RuntimeError("the kitchen is closed")
    return fine(task, llm)

def forks(task, llm):
    import os, sys
    fine(task, llm)
    if os.fork() == 0:
        sys.exit(0)
    return {"reward": 1.0, "task": {"a": 1.0, "b": 2.0, "t": 3.0}[task.id]}
"""
TASKS = '{"id": "a", "data": {}}\n{"id": "b", "data": {}}\n{"id": "t", "split": "test", "data": {}}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    return tmp_path


def command(place: Path, agent: str) -> list[str]:
    small = ["loop.steps=1", "loop.groups=1", "loop.group_size=2", "runner.workers=2", "policy.context=64"]
    given = ("train", f"{place}/agents.py:{agent}", "--tasks", place / "tasks.jsonl", "--folder", f"{place}/run")
    return [*runs.strop(*given), *(f"--set={s}" for s in small)]


def train(place: Path, agent: str = "fine", *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command(place, agent), *more], capture_output=True, text=True, timeout=120, check=False)


def sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on stderr."""
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("strop: ")
    return lines[0]


def test_a_good_run_to_begin_with(place: Path) -> None:
    assert train(place).returncode == 0


def test_unknown_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = sentence(train(place, "fine", "--model", "qwen/nothing"), 2)
    assert "qwen/nothing" in said
    assert "strop/nano" in said
    assert not (place / "run").exists()


def test_model_folder_with_broken_weights(place: Path) -> None:
    (place / "model").mkdir()
    nano = Path(runs.__file__).parent.parent / "src/strop/models/nano"
    for file in nano.iterdir():
        (place / "model" / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    assert "cannot be loaded" in sentence(train(place, "fine", "--model", f"{place}/model"), 2)


def test_agent_that_raises(place: Path) -> None:
    said = sentence(train(place, "raises"), 2)
    assert "RuntimeError: the kitchen is closed" in said
    assert "strop rollouts" in said
    told = runs.story(place / "run")
    assert told.rollouts
    assert all(rollout.cause == "agent_error" for rollout in told.rollouts)
    assert all(told.turns[rollout.id] for rollout in told.rollouts)  # what it sampled before is kept


def test_agent_that_is_not_there_leaves_nothing(place: Path) -> None:
    (place / "agents.py").rename(place / "agent.py")
    assert f"Fix: write {place}/agent.py" in sentence(train(place), 2)
    (place / "agent.py").rename(place / "agents.py")
    assert f"Fix: write {place}/agents.py:fine" in sentence(train(place, "fin"), 2)
    assert not (place / "run").exists()


def test_agent_that_returns_nan(place: Path) -> None:
    said = sentence(train(place, "nan"), 2)
    assert "bad_reward" in said
    assert "nan" in said
    assert all(rollout.rewards == () for rollout in runs.story(place / "run").rollouts)


def test_agent_that_returns_a_string(place: Path) -> None:
    assert "bad_reward" in sentence(train(place, "text"), 2)


def test_agent_that_never_answers(place: Path) -> None:
    said = sentence(train(place, "hangs", "--set=runner.timeout=1"), 2)
    assert "timeout" in said
    assert "runner.timeout" in said


def test_agents_that_take_longer_than_a_group_may(place: Path) -> None:
    """The rollouts are ended for it, and nothing of them lives on."""
    said = sentence(train(place, "hangs", "--set=loop.group_deadline=1"), 2)
    assert "loop.group_deadline" in said
    assert "begin again" in said  # a resumed run would keep the deadline, and what it ended
    assert {rollout.cause for rollout in runs.story(place / "run").rollouts} == {"late"}


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_a_group(place: Path) -> None:
    """As long as its rollouts end, one after another."""
    (place / "tasks.jsonl").write_text(TASKS + '{"id": "u", "split": "test"}\n{"id": "v", "split": "test"}\n')
    more = ("--set=loop.group_deadline=8", "--set=runner.workers=1", "--set=loop.group_size=1")
    assert train(place, "slow", *more).returncode == 0
    told = runs.story(place / "run")
    assert len(told.rollouts) == 2 * (3 + 3) + 1
    assert {rollout.status for rollout in told.rollouts} == {"succeeded"}


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_leaves_a_run_to_be_resumed(place: Path) -> None:
    """All steps are made, and what they came to is not known yet."""
    metrics = place / "run" / "metrics.jsonl"
    with subprocess.Popen(
        [*command(place, "slow"), "--set=runner.workers=1"], text=True, stdout=subprocess.PIPE
    ) as run:
        while not (metrics.exists() and "timing_s/step" in metrics.read_text()):
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert "train --resume" in run.communicate(timeout=60)[0]
    assert run.returncode == 130
    assert read(place / "run").record.state == "stopped"
    runs.finish(runs.strop("train", "--resume", place / "run"))
    assert read(place / "run").record.state == "done"


@pytest.mark.slow
def test_a_group_that_stands_in_for_another_may_fail(place: Path) -> None:
    """The first group taught nothing, the second one's task makes the agent fail: that is a bad task, no bad agent."""
    more = ("--set=loop.max_groups=2", "--set=loop.eval_splits=[]")
    assert train(place, "second_group_raises", *more).returncode == 0
    told = runs.story(place / "run")
    assert len(told.steps) == 1
    assert {rollout.group: rollout.cause for rollout in told.rollouts} == {"g000000": None, "g000001": "agent_error"}


def test_agent_that_calls_another_port(place: Path) -> None:
    said = sentence(train(place, "elsewhere"), 2)
    assert "APIConnectionError" in said
    assert "base_url" in said


def test_agent_that_never_calls_the_model(place: Path) -> None:
    said = sentence(train(place, "alone"), 2)
    assert "llm.base_url" in said


def test_agent_that_returns_nothing(place: Path) -> None:
    said = sentence(train(place, "nothing"), 2)
    assert "gave no reward" in said


def test_agent_whose_rewards_nobody_counts(place: Path) -> None:
    assert "algorithm.rewards.score=1" in sentence(train(place, "other"), 2)
    again = subprocess.run(
        runs.strop("train", "--resume", place / "run"), capture_output=True, text=True, timeout=120, check=False
    )
    assert "algorithm.rewards.score=1" in sentence(again, 2)
    assert not runs.story(place / "run").steps


def test_agent_whose_rewards_nobody_counts_where_nothing_is_evaluated(place: Path) -> None:
    assert "algorithm.rewards.score=1" in sentence(train(place, "other", "--set=loop.eval_splits=[]"), 2)
    assert not runs.story(place / "run").steps


def test_agent_that_forks(place: Path) -> None:
    """The child's end is nobody's answer: every rollout keeps its own rewards."""
    assert train(place, "forks").returncode == 0
    for rollout in runs.story(place / "run").rollouts:
        assert rollout.reward("task") == {"a": 1.0, "b": 2.0, "t": 3.0}[rollout.task.id]


def test_agent_that_is_not_there(place: Path) -> None:
    assert ". Fix: write " in sentence(train(place, "fin"), 2)
    assert train(place, "fine").returncode == 0  # nothing stands in the way of the right one


def test_agent_whose_framework_is_not_installed(place: Path) -> None:
    (place / "agents.py").write_text("import no_such_framework\n" + AGENTS)
    began = time.monotonic()
    said = sentence(train(place), 2)
    assert time.monotonic() - began < stretch(60), "it waited for something that cannot come"
    assert "No module named 'no_such_framework'" in said
    assert "-m pip install no_such_framework, or set runner.python to one that has it" in said
    assert "runner.workers" not in said


def test_agent_that_is_mended(place: Path) -> None:
    """What failed before the first step is tried again on resume, also from another folder."""
    (place / "agents.py").write_text(AGENTS.replace("return 1.0", "raise OSError('the tool server is down')"))
    assert "the tool server is down" in sentence(train(place), 2)
    (place / "agents.py").write_text(AGENTS)
    done = subprocess.run(
        runs.strop("train", "--resume", place / "run"), cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_port_in_use(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = sentence(train(place, "fine", f"--set=gateway.port={port}"), 2)
    assert str(port) in said
    assert "gateway.port=0" in said
    assert train(place, "fine", f"--set=gateway.port={port}").returncode == 0  # once the port is free


def test_folder_that_cannot_be_written(place: Path) -> None:
    said = sentence(train(place, "fine", "--folder", "/sys/run"), 2)  # not even root may write there
    assert "/sys/run" in said
    assert "--folder" in said


def test_folder_that_holds_a_run(place: Path) -> None:
    assert train(place).returncode == 0
    before = runs.story(place / "run")
    again = train(place)
    assert again.returncode == 0, again.stderr
    assert again.stderr == f"strop: {place}/run holds a run: this one is kept in {place}/run-2\n"
    assert (place / "run-2" / "summary.json").is_file()
    assert runs.story(place / "run") == before


@pytest.mark.parametrize(
    ("line", "hint"),
    [("{oops", "line 2"), ('{"id": "a"}', "'a'"), ("[1]", "line 2"), ('{"agent": "b", "data": 1}', "`agents`")],
    ids=["not json", "same id twice", "no object", "another agent"],
)
def test_bad_tasks(place: Path, line: str, hint: str) -> None:
    (place / "tasks.jsonl").write_text('{"id": "a", "data": {}}\n' + line + '\n{"split": "test"}\n')
    assert hint in sentence(train(place), 2)


def test_no_tasks_to_train_on(place: Path) -> None:
    (place / "tasks.jsonl").write_text('{"id": "t", "split": "test", "data": {}}\n')
    assert "'train'" in sentence(train(place), 2)


def test_unknown_setting(place: Path) -> None:
    assert "Fix: write loop.steps" in sentence(train(place, "fine", "--set=loop.step=3"), 2)


def test_resume_of_nothing(place: Path) -> None:
    done = subprocess.run(runs.strop("train", "--resume", place), capture_output=True, text=True, check=False)
    assert "holds no run" in sentence(done, 2)
