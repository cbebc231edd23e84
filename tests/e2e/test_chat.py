"""`strop chat` and a served export, as a user types them: through a pipe, at a terminal, with a run and its agent."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from strop.config import Config
from strop.errors import LearnerError, ModelError
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.models.names import resolve
from strop.types import stable_hash
from tests import runs

ROOT = Path(__file__).parents[2]
TINY = ["loop.steps=1", "loop.groups=2", "loop.group_size=2", "loop.eval_splits=[]", "runner.workers=4"]
CALCULATOR = '''
def calculator(expression: str) -> str:
    """Compute one operation on two integers."""
    raise ValueError("the batteries are empty")
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    runs.finish(runs.demo(folder, *TINY))
    return folder


def chat(folder: Path, said: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = runs.strop("chat", *map(str, arguments))
    done = subprocess.run(command, cwd=folder, input=said, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


# -- pipes -------------------------------------------------------------------------------------------------------------


def test_lines_in_answers_out(tmp_path: Path) -> None:
    said = "What is 12 + 30?\n\nAnd 4 + 5?\n/reset\nWhat is 12 + 30?\n/quit\nnot any more\n"
    done = chat(tmp_path, said, "strop/nano", "--seed", 7, "--folder", "said")
    assert done.stderr == "loading strop/nano\n"
    story = runs.story(tmp_path / "said")
    assert [rollout.status for rollout in story.rollouts] == ["succeeded"] * 2
    assert [rollout.seed for rollout in story.rollouts] == [stable_hash(7, "chat", 1), stable_hash(7, "chat", 2)]
    (first, second), (third,) = story.turns.values()
    assert done.stdout == "".join(f"{turn.answer['content']}\n" for turn in (first, second, third))
    assert (second.parent, second.branch, second.shared) == (first.id, None, len(first.ids))
    assert second.prompt_ids[: second.shared] == first.ids
    assert (first.parent, third.parent) == (None, None)


def test_what_users_get_wrong_is_one_sentence(tmp_path: Path, run: Path) -> None:
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun" / "config.json").write_bytes((run / "config.json").read_bytes())
    for arguments, says in {
        ("strop/none",): "there is no model 'strop/none'",
        ("begun",): "begun has no checkpoint yet",
        ("strop/nano", "--agent"): "--agent needs a run, and strop/nano is not one",
        ("strop/nano", "--best"): "--best needs a run's checkpoints",
        ("strop/nano", "--tools", "nowhere.py:f"): "tools: there is no file",
        ("strop/nano", "--folder", "begun"): "begun holds a run or a model",
        ("strop/nano", "--temperature", "-1"): "policy.eval.temperature does not fit",
    }.items():
        done = chat(tmp_path, "hello\n", *arguments, code=2)
        assert says in done.stderr.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"begun"}  # nothing was left behind


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_runs_checkpoint_with_a_tool_that_raises(tmp_path: Path, run: Path) -> None:
    (tmp_path / "tools.py").write_text(CALCULATOR)
    options = ["--best", "--tools", "tools.py:calculator", "--rounds", 2, "--seed", 1, "--folder", "said", "--json"]
    done = chat(tmp_path, "Use the calculator: 12 + 30.\n/reset\n" * 8, run, *options)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 8
    calls = [call for answer in answers for call in answer["calls"]]
    assert calls  # it uses the tool most of the time when it is named
    assert {call["name"] for call in calls} == {"calculator"}
    assert {call["result"] for call in calls} == {"error: ValueError: the batteries are empty"}
    story = runs.story(tmp_path / "said")
    for answer, turns in zip(answers, story.turns.values(), strict=True):
        assert [turn.id for turn in turns] == [turn["id"] for turn in answer["turns"]]
        assert turns[0].sampling.max_tokens == 48  # as the run evaluates
        for before, turn in pairwise(turns):
            assert (turn.parent, turn.branch, turn.prompt_ids[: turn.shared]) == (before.id, None, before.ids)


def test_the_demos_run_has_its_calculator(tmp_path: Path, run: Path) -> None:
    said = "Use the calculator: 12 + 30.\n/reset\n" * 8
    done = chat(tmp_path, said, run, "--seed", 1, "--folder", "said", "--json")
    calls = [call for line in done.stdout.splitlines() for call in json.loads(line)["calls"]]
    assert {"name": "calculator", "arguments": '{"expression":"12 + 30"}', "result": "42"} in calls
    trained = next(turns for turns in runs.story(run).turns.values())[0]
    tools = [
        turn.prompt_ids[: trained.prompt_ids.index(2)]
        for t in runs.story(tmp_path / "said").turns.values()
        for turn in t
    ]
    assert all(ids == trained.prompt_ids[: trained.prompt_ids.index(2)] for ids in tools), "shown as in training"
    done = chat(tmp_path, said, run, "--seed", 1, "--tools", "none", "--json")
    assert not [call for line in done.stdout.splitlines() for call in json.loads(line)["calls"]]


def test_a_runs_agent_and_its_turns(tmp_path: Path, run: Path) -> None:
    done = chat(tmp_path, "Use the calculator: 12 + 30.\n" * 3, run, "--agent", "--folder", "said")
    story = runs.story(tmp_path / "said")
    assert [rollout.status for rollout in story.rollouts] == ["succeeded"] * 3
    assert done.stdout.count("user  Use the calculator: 12 + 30.") == 3
    for turns in story.turns.values():
        assert turns[0].messages == [{"role": "user", "content": "Use the calculator: 12 + 30."}]
        assert turns[-1].answer["content"] in done.stdout
    observed = [turn.messages[-1]["content"] for turns in story.turns.values() for turn in turns[1:]]
    assert [f"     tool  {text}" for text in observed] == re.findall(r"^     tool  .*", done.stdout, re.MULTILINE)


# -- a terminal --------------------------------------------------------------------------------------------------------


class Screen:
    """A terminal, from the side of whoever sits before it."""

    def __init__(self, process: subprocess.Popen[bytes], handle: int) -> None:
        self.process, self._handle = process, handle
        self.seen = ""
        self.pieces: list[str] = []

    def until(self, pattern: str, limit: float = 60) -> str:
        """Read on until something is there; what was read on the way."""
        began = len(self.seen)
        deadline = time.monotonic() + limit
        while not re.search(pattern, self.seen[began:]):
            assert time.monotonic() < deadline, self.seen[began:]
            if select.select([self._handle], [], [], 0.2)[0]:
                self.pieces.append(os.read(self._handle, 4096).decode())
                self.seen += self.pieces[-1]
        return self.seen[began:]

    def type(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C until something is there. Between a prompt and the reading behind it Python hears of the first
        press with the next key only; several that were not heard of yet are one."""
        for _ in range(5):
            self.type("\x03")
            with suppress(AssertionError):
                self.until(pattern, limit=8)
                return
        raise AssertionError(self.seen)

    def ended(self, press: str = "") -> int:
        """How it ended. `press` is what makes it end, pressed again where it was not heard."""
        for _ in range(5):
            self.type(press)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(12)
        return self.process.wait(0)


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=in_front,
    )
    os.close(theirs)
    try:
        yield Screen(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        os.close(ours)


def in_front() -> None:
    """So that Ctrl-C reaches it, also where the tests run in the background of a shell, which ignores it there."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


PROMPT = r"> \x1b\[0m"


def test_streaming_stopping_and_beginning_anew_at_a_terminal(tmp_path: Path) -> None:
    with terminal([sys.executable, "-m", "tests.e2e.slow_chat", str(tmp_path)], ROOT) as screen:
        screen.until(PROMPT)
        screen.pieces.clear()
        screen.type("count\n")
        said = screen.until(r"\d+ tokens · \d+ tokens/s · stop · a new session(.|\n)*" + PROMPT)
        assert "one two three four five six seven eight" in said
        assert len([piece for piece in screen.pieces if re.search("[a-z]", piece)]) > 4  # bit by bit
        screen.type("is it?\n")
        said = screen.until(r"extends the session exactly \(\d+ tokens kept\)(.|\n)*" + PROMPT)
        assert "\x1b[31mYes" not in said  # what a model says is shown, not obeyed
        screen.type("hang\n")
        screen.until("it begins")
        screen.type("\x03")
        screen.until("stopped: the question(.|\n)*" + PROMPT)
        screen.type("/reset\n")
        screen.until("a new conversation begins(.|\n)*" + PROMPT)
        screen.type("is it?\n")
        screen.until("a new session(.|\n)*" + PROMPT)
        screen.interrupt("Ctrl-C again leaves(.|\n)*" + PROMPT)
        assert screen.ended("\x03") == 0
    story = runs.story(tmp_path)
    assert [[turn.finish for turn in turns] for turns in story.turns.values()] == [
        ["stop", "stop", "abandoned"],
        ["stop"],
    ]


def test_a_model_at_a_terminal(tmp_path: Path) -> None:
    with terminal(runs.strop("chat", "strop/nano"), tmp_path) as screen:
        assert "context 1024 tokens, temperature 1" in screen.until(PROMPT)
        screen.type("What is 12 + 30?\n")
        screen.until("a new session(.|\n)*" + PROMPT)
        screen.type("\x04")
        assert "what was said is kept: strop rollouts runs/chat/" in screen.until(r"rollouts runs/chat/[\d-]+")
        assert screen.ended() == 0


# -- strop serve --model EXPORT ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_export_is_served_with_exact_sessions(tmp_path: Path, run: Path) -> None:
    runs.finish(runs.strop("export", run, tmp_path / "export"))
    weights = (tmp_path / "export" / "model.safetensors").read_bytes()
    command = runs.strop("serve", "--model", "export", "--folder", "served", "--port", "0", "--json")
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "What is 12 + 30?"}\n')
        (tmp_path / "agent.py").write_text(AGENT)
        keys = ["--url", said["url"], "--key-file", tmp_path / "served" / "key"]
        enqueue = runs.strop("enqueue", "--tasks", tmp_path / "tasks.jsonl", "--name", "q", "--mode", "train", *keys)
        runner = runs.strop("runner", "--agent", f"{tmp_path}/agent.py:agent", "--until-empty", "--json", *keys)
        runs.finish(enqueue)
        assert json.loads(runs.finish(runner).stdout) == {"leased": 1, "succeeded": 1}
    finally:
        server.terminate()
        _, stderr = server.communicate(timeout=60)
    assert (server.returncode, stderr) == (0, "")
    story = runs.story(tmp_path / "served")
    first, second = story.turns["q-000000.0"]
    assert (second.parent, second.branch, second.shared) == (first.id, None, len(first.ids))
    assert second.prompt_ids[: second.shared] == first.ids
    assert first.versions == second.versions == [(0, "1.0")]
    assert story.history == []  # no step was ever made
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == weights


AGENT = """
import openai, os

def agent(task, llm):
    client = openai.OpenAI()
    messages = [{"role": "user", "content": task.data["question"]}]
    said = client.chat.completions.create(model=llm.model, messages=messages)
    messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And 4 + 5?"}]
    stream = client.chat.completions.create(model=llm.model, messages=messages, stream=True)
    return float(len("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)) > 0)
"""


async def test_a_model_that_is_only_served_cannot_be_trained(tmp_path: Path) -> None:
    process = LearnerProcess(tmp_path / "log")
    try:
        await process.start(LearnerSettings.of(Config(), resolve("strop/nano"), train=False))
        held = process.of()
        for trained in (held.digest(), held.restore(tmp_path), held.begin_save(tmp_path / "c", {})):
            with pytest.raises(LearnerError, match="only served here, not trained"):
                await trained
    finally:
        await process.close()


def test_what_is_no_model_yet_says_how_to_make_one_of_it(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ModelError, match=f"`strop export {run} FOLDER`"):
        resolve(str(run))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is an adapter: `strop export .* FOLDER` merges it"):
        resolve(str(tmp_path))
