"""An environment behind OpenEnv's own server: three steps with the model in the box, from the command line."""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.errors import AgentError
from strop.testing import run
from tests.frameworks import environments
from tests.runs import finish, story, strop

pytestmark = pytest.mark.frameworks

SERVER = Path(__file__).parent / "agents" / "openenv_lake.py"


@pytest.fixture
def python() -> Path:
    if not environments.ready("openenv"):
        pytest.skip("openenv is not installed: run `make frameworks`")
    return environments.program("openenv")


@pytest.fixture
def url(python: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(python), str(SERVER), request.param, str(port)])
    deadline = time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/schema", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("url", ["say", "go"], indirect=True)
def test_three_steps(python: Path, url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = [
        *(f'tasks_args.url="{url}"', "tasks_args.max_turns=4", f"runner.python={python}", "policy.train.max_tokens=2"),
        *("loop.steps=3", "loop.groups=2", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4"),
    ]
    which = ("strop.compat.openenv:agent", "--tasks", "strop.compat.openenv:tasks", "--model", "strop/nano")
    finish(strop("train", *which, "--folder", tmp_path / "run", *(f"--set={one}" for one in given)))
    told = story(tmp_path / "run")
    assert {(one.status, one.detail) for one in told.rollouts} == {("succeeded", None)}
    assert (len(told.rollouts), len(told.steps)) == (24, 3)
    assert all(step.metrics["training/rollout_logprobs_diff_max"] < 1e-4 for step in told.steps)
    arrived = 0
    for rollout in told.rollouts:
        turns = told.turns[rollout.id]
        rewards = {one.turn: one.value for one in rollout.rewards if one.name == "step"}
        assert list(rewards) == [turn.id for turn in turns]
        at = int(re.findall(r"\d+", turns[0].messages[-1]["content"])[0])
        for number, turn in enumerate(turns):
            said, seen = turn.answer["content"], [t.messages[-1]["content"] for t in turns[number + 1 : number + 2]]
            if request.node.callspec.params["url"] == "go":  # no JSON object in two tokens
                assert rewards[turn.id] == 0
                assert all(text.startswith("error: there is no JSON") for text in seen)
            elif not said:
                assert rewards[turn.id] == 0
                assert all("VALIDATION_ERROR" in text for text in seen)
            else:
                steps = sum(letter.isdigit() for letter in said)
                at += steps
                assert rewards[turn.id] == steps / 10
                assert all(text == f"You are at {at}." for text in seen)
        arrived += at >= 3
        assert at >= 3 or len(turns) == 4
        assert rollout.reward() == pytest.approx(sum(rewards.values()))
    assert arrived or request.node.callspec.params["url"] == "go", "nobody came to the door, so nothing was tried"


def test_a_server_that_is_not_there() -> None:
    from strop.compat import openenv

    (task,) = openenv.tasks("http://127.0.0.1:9", count=1, held=0)
    with pytest.raises(AgentError, match=r"http://127.0.0.1:9 does not say what its actions are .* Fix: "):
        run(openenv.agent, task, answers=["1"])


def test_resets_instead_of_seeds() -> None:
    from strop.compat import openenv

    made = openenv.tasks("http://h", resets=[{"level": 1}, {"level": 2}, {"level": 3}], held=1)
    assert [(task.split, task.data["reset"]) for task in made] == [
        ("train", {"level": 1}),
        ("train", {"level": 2}),
        ("test", {"level": 3}),
    ]
    assert json.dumps(made[0].data)
