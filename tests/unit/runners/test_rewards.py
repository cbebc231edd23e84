"""What agents and reward functions return, as rewards."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from strop.agent.llm import LLM
from strop.errors import AgentError, BadReward
from strop.rewards import Verdict
from strop.runners.base import Job, Outcome
from strop.runners.rewards import (
    RewardFunction,
    compute_outcome,
    compute_outcome_now,
    is_rewards,
    load_reward_function,
    parse_rewards,
)
from strop.types import Reward, Task


def job() -> Job:
    base = "http://127.0.0.1:9/r/g1.0/2"
    llm = LLM(
        base_url=f"{base}/agents/main/v1",
        api_key="secret",
        trace_id="secret",
        model="main",
        events_url=f"{base}/events",
        rollout="g1.0",
        task=Task(id="t", data={"answer": 12}),
    )
    return Job(llm=llm, seed=5, task_file="unused")


class Scalar:
    """As numpy's and torch's scalars do it."""

    def __float__(self) -> float:
        return 0.5


class Vector:
    """As torch's tensors of several numbers do it."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        raise ValueError("not even shown")


@pytest.mark.parametrize(
    ("value", "rewards"),
    [
        (None, []),
        (1, [Reward(value=1.0)]),
        (0.25, [Reward(value=0.25)]),
        (True, [Reward(value=1.0)]),
        (Scalar(), [Reward(value=0.5)]),
        ({"reward": 1, "format": False}, [Reward(value=1.0), Reward(name="format", value=0.0)]),
        ({"value": 0.5}, [Reward(name="value", value=0.5)]),
        ({}, []),
        ([], []),
        (Reward(name="a", value=2, turn="g1.0/1/0"), [Reward(name="a", value=2.0, turn="g1.0/1/0")]),
        ((Reward(name="a", value=2), Reward(value=3)), [Reward(name="a", value=2.0), Reward(value=3.0)]),
        ([{"name": "a", "value": True, "turn": "g1.0/1/0"}], [Reward(name="a", value=1.0, turn="g1.0/1/0")]),
        ([{"value": 2, "agent": "b", "turn": None}], [Reward(value=2.0, agent="b")]),
        ({"name": "a", "value": 2}, [Reward(name="a", value=2.0)]),
    ],
)
def test_what_may_be_returned(value: object, rewards: list[Reward]) -> None:
    assert parse_rewards(value) == rewards
    assert all(type(reward.value) is float for reward in parse_rewards(value))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "reward 'reward' is nan: give a finite number"),
        (-math.inf, "reward 'reward' is -inf"),
        (1.7e308, r"reward 'reward' is 1\.7e\+308: give a number between -1e\+09 and 1e\+09"),
        ({"a": 1, "b": -1e39}, r"reward 'b' is -1e\+39"),
        ([{"value": 10**12}], "give a number between"),
        ("1.0", r"returned str '1.0' as 'reward'\. Fix: return a number"),
        ("x" * 10_000, r"returned str 'x+\.\.\.x+' as 'reward'"),
        ({"a": 1, "b": math.nan}, "reward 'b' is nan"),
        ([{"value": 1, "agent": "\ud800"}], r"is for '\\ud800': name a turn or an agent with printable characters"),
        ([{"value": 1, "turn": "\ud800"}], r"is for '\\ud800': name a turn or an agent with printable characters"),
        ({"a": "x"}, "str 'x' as 'a'"),
        ({"": 1}, "a name of printable characters"),
        ([1.0, 2.0], r"list of something else than Reward \(float 1\.0\)"),
        ([{"name": "a", "value": 1, "turns": "x"}], "with 'turns' in it"),
        ([{"name": 3, "value": 1}], "name, turn and agent are text"),
        ([{"value": "1"}], "str '1' as 'reward'"),
        ([{"value": 1, "turn": "t", "agent": "a"}], "names a turn and an agent"),
        ([{"value": math.inf}], "reward 'reward' is inf"),
        (object(), "returned object .* as 'reward'"),
        (10**400, "not a single number"),
        (Vector(), "returned Vector .* which is not a single number: a Tensor with 2"),
        (Reward(name="r", value=math.inf), "reward 'r' is inf"),
    ],
)
def test_what_may_not_be_returned(value: object, says: str) -> None:
    with pytest.raises(BadReward, match=says) as refused:
        parse_rewards(value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("value", [1, 0.5, math.nan, True, {"a": 1}, {}, [], [{"value": 1}], {"name": "a", "value": 1}])
def test_plain_data_that_is_meant_as_rewards(value: Any) -> None:
    assert is_rewards(value)


@pytest.mark.parametrize("value", ["1", None, {"a": "1"}, {"a": [1]}, [1], [{"a": 1}], ["x"], [[1]]])
def test_plain_data_that_is_not(value: Any) -> None:
    assert not is_rewards(value)


# -- reward functions ------------------------------------------------------------------------------------------------

JUDGES = """
import asyncio
import time

def right(task, answer):
    return {"reward": answer == task.data["answer"], "short": len(str(answer)) < 3}

def asks(task, answer, llm):
    return Reward_of(llm)

def optional(task, answer, llm=None):
    return Reward_of(llm)

def strict(task, answer, exact=True):
    return float(exact is True)

async def later(task, answer):
    await asyncio.sleep(0)
    return answer == task.data["answer"]

async def later_asks(task, answer, llm):
    await asyncio.sleep(0)
    return Reward_of(llm)

class Graded:
    async def __call__(self, task, answer):
        return 0.25

def Reward_of(llm):
    return [{"name": llm.rollout, "value": 1}]

def fails(task, answer):
    return answer["no such thing"]

def exits(task, answer):
    raise SystemExit(3)

def ends(task, answer):
    next(iter(()))

async def later_fails(task, answer):
    raise ValueError("y" * 10_000 + " the end")

def text(task, answer):
    return "good"

def slow(task, answer):
    time.sleep(1)

async def never(task, answer):
    await asyncio.sleep(60)

graded = Graded()
number = 3
def one(task): ...
def four(task, answer, llm, more): ...
"""


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    path = tmp_path / "judges_of_test_rewards.py"
    path.write_text(JUDGES)
    return path


async def both(answer: Any, judge: RewardFunction | None) -> Outcome:
    """In the loop and without one, it comes to the same."""
    outcome = await compute_outcome(answer, job(), judge)
    assert await asyncio.to_thread(compute_outcome_now, answer, job(), judge) == outcome
    return outcome


async def test_without_a_reward_function_the_answer_is_the_reward() -> None:
    assert load_reward_function("") is None
    assert await both(0.5, None) == Outcome(rewards=[Reward(value=0.5)])
    bad = await both("text", None)
    assert bad.cause == "bad_reward"
    assert bad.detail is not None
    assert bad.detail.startswith("the agent returned str 'text'")


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("right", [Reward(value=1.0), Reward(name="short", value=1.0)]),
        ("asks", [Reward(name="g1.0", value=1.0)]),
        ("optional", [Reward(name="g1.0", value=1.0)]),
        ("strict", [Reward(value=1.0)]),
        ("later", [Reward(value=1.0)]),
        ("later_asks", [Reward(name="g1.0", value=1.0)]),
        ("graded", [Reward(value=0.25)]),
    ],
)
async def test_a_reward_function_turns_any_answer_into_rewards(judges: Path, name: str, rewards: list[Reward]) -> None:
    assert await both(12, load_reward_function(f"{judges}:{name}")) == Outcome(rewards=rewards)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "TypeError: 'int' object is not subscriptable"),
        ("exits", "SystemExit: 3"),
        ("ends", "StopIteration"),
        ("later_fails", "y the end"),
    ],
)
async def test_a_reward_function_that_fails_is_an_outcome(judges: Path, name: str, says: str) -> None:
    outcome = await both(12, load_reward_function(f"{judges}:{name}"))
    assert outcome.cause == "agent_error"
    assert outcome.detail is not None
    assert outcome.detail.startswith("the reward function failed: ")
    assert outcome.detail.endswith(says)
    assert len(outcome.detail) < 5000
    assert "runners/rewards.py" not in outcome.detail
    assert name == "later_fails" or f"in {name}" in outcome.detail


async def test_a_bad_reward_names_the_reward_function(judges: Path) -> None:
    outcome = await both(12, load_reward_function(f"{judges}:text"))
    assert outcome.cause == "bad_reward"
    assert outcome.detail is not None
    assert outcome.detail.startswith("the reward function returned str 'good'")


async def test_no_verdict_is_nobodys_fault() -> None:
    """It fails the rollout in a way that is left out of training, wherever it is made a number of."""

    def unsure(task: Task, answer: Any, llm: Any) -> Any:
        verdict = Verdict(None, "the judge is down")
        return verdict if answer == "as it is" else {"reward": float(verdict)}

    for answer in ("as it is", "by hand"):
        outcome = await both(answer, unsure)
        assert outcome.cause == "bad_reward"
        assert str(outcome.detail).endswith("there is no verdict: the judge is down")


async def test_a_slow_reward_function_does_not_stop_the_loop_and_can_be_left(judges: Path) -> None:
    for name in ("slow", "never"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await compute_outcome(1, job(), load_reward_function(f"{judges}:{name}"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "^reward: .* has no 'nothing'"),
        ("number", r"^reward: .*is int\. Fix: name a function"),
        ("one", r"takes \(task\)\. Fix: write it as f\(task, answer\)"),
        ("four", "takes .*more"),
    ],
)
def test_a_reward_function_that_cannot_be_had(judges: Path, name: str, says: str) -> None:
    with pytest.raises(AgentError, match=says):
        load_reward_function(f"{judges}:{name}")
