"""What is said where verifiers is not there, and how its scores are counted. The real ones are in tests/frameworks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.agent.llm import LLM
from strop.compat import verifiers
from strop.compat.verifiers.gateway import write_url
from strop.compat.verifiers.tasksets import read_episode
from strop.errors import AgentError, TaskError
from strop.types import Reward, Task

without = pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed here")


@without
def test_what_is_missing_is_said() -> None:
    with pytest.raises(AgentError, match=r"verifiers cannot be imported here .* Fix: pip install verifiers"):
        verifiers.tasks("wordle")
    with pytest.raises(TaskError, match=r"wordle was not read by .*: verifiers cannot be imported here"):
        verifiers.tasks("wordle", python=sys.executable)
    with pytest.raises(TaskError, match=r"tasks_args\.python: no-python cannot be run"):
        verifiers.tasks("wordle", python="no-python")


def test_the_command_writes_nothing_where_it_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "strop.compat.verifiers", "nothing-here", str(tmp_path / "tasks.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Fix: " in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_task_of_something_else_is_refused() -> None:
    task = Task(id="t", data={"question": "?"})
    with pytest.raises(AgentError, match=r"task t names no environment of verifiers\. Fix: "):
        asyncio.run(verifiers.agent(task, model(task)))


def test_the_key_is_in_the_address() -> None:
    """verifiers reads keys from variables, and rollouts of one process have a key each."""
    assert write_url(model(Task(id="t"))) == "http://127.0.0.1:1/k/the-key/v1"


def model(task: Task) -> LLM:
    base = "http://127.0.0.1:1/r/g1.0/1/agents/main/v1"
    return LLM(base_url=base, api_key="the-key", model="m", trace_id="", events_url="", rollout="g1.0", task=task)


def trace(seat: str, trainable: bool, **scores: float) -> Any:
    rewards = {name: SimpleNamespace(score=score) for name, score in scores.items()}
    agent = SimpleNamespace(name=seat, trainable=trainable)
    return SimpleNamespace(
        agent=agent, rewards=rewards, metrics={"turns": 2.0, "unseen": None}, reward=sum(scores.values())
    )


def episode(*traces: Any) -> Any:
    seats: dict[str, list[Any]] = {}
    for one in traces:
        seats.setdefault(one.agent.name, []).append(one)
    return SimpleNamespace(traces=list(traces), by_agent=seats)


def test_one_trace_rewards_the_rollout() -> None:
    assert read_episode(episode(trace("agent", True, right=1.0))) == [
        Reward(name="reward", value=1.0),
        Reward(name="turns", value=2.0),
        Reward(name="right", value=1.0),
    ]


def test_several_traces_reward_their_agents() -> None:
    """Each seat that is trained, with the mean of its traces; a seat that is not trained gets nothing."""
    solved = [trace("solver", True, right=1.0), trace("solver", True, right=0.0, short=0.5)]
    given = read_episode(episode(*solved, trace("agent", True, right=1.0), trace("judge", False, right=1.0)))
    assert {(one.name, one.agent): one.value for one in given} == {
        ("reward", "solver"): 0.75,
        ("turns", "solver"): 2.0,
        ("right", "solver"): 0.5,
        ("short", "solver"): 0.5,
        ("reward", "main"): 1.0,
        ("turns", "main"): 2.0,
        ("right", "main"): 1.0,
    }
