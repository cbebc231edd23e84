"""What an agent returned, as rewards.

    without a reward function:  answer ──────────────────────────▶ parse_rewards ──▶ Outcome
    with one:                   answer ──▶ reward_function(task, answer) ──▶ parse_rewards ──▶ Outcome

A reward function turns the agent's answer, which may then be anything, into what an agent may return without one. Like
an agent it is named by FILE.py:function or package.module:function, and may be `async`. One that asks a model itself
takes the agent's `llm` as a third parameter.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import reprlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

from strop.agent.functions import is_async, run_until_done
from strop.agent.llm import LLM
from strop.errors import AgentError, BadReward
from strop.imports import resolve
from strop.runners.base import Job, Outcome
from strop.types import Reward, Task

RewardFunction = Callable[[Task, Any, LLM], Any]
"""A reward function, whatever it takes itself."""

MAX_DETAIL = 4000
FIELDS = frozenset(Reward.__struct_fields__)


def parse_rewards(value: Any, who: str = "the agent") -> list[Reward]:
    """Numbers and bools are the reward called `reward`, dicts are named rewards, and for a target give
    `Reward`s or dicts that look like them. `BadReward` says what is wrong with anything else.

    >>> parse_rewards({"reward": True, "format": 0.5})
    [Reward(name='reward', value=1.0, turn=None, agent=None), Reward(name='format', value=0.5, turn=None, agent=None)]
    >>> parse_rewards([{"name": "style", "value": 1, "agent": "writer"}])
    [Reward(name='style', value=1.0, turn=None, agent='writer')]
    >>> parse_rewards(None)
    []
    """
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [_one(item, who) for item in cast("list[Any]", value)]
    if isinstance(value, Reward) or _like_reward(value):
        return [_one(value, who)]
    if isinstance(value, Mapping):
        return [_make_reward(who, str(name), number) for name, number in cast("Mapping[Any, Any]", value).items()]
    return [_make_reward(who, "reward", value)]


def is_rewards(value: Any) -> bool:
    """Whether plain data (JSON) is meant as rewards: a number, an object of numbers, or a list of reward objects. They
    may still be bad ones.

    >>> is_rewards(0.5), is_rewards({"a": 1, "b": True}), is_rewards({"answer": "42"}), is_rewards([1, 2])
    (True, True, False, False)
    """
    if isinstance(value, dict):
        return _like_reward(value) or all(isinstance(n, (int, float)) for n in cast("dict[Any, Any]", value).values())
    if isinstance(value, list):
        return all(isinstance(item, dict) and "value" in item for item in cast("list[Any]", value))
    return isinstance(value, (int, float))


def _like_reward(value: Any) -> bool:
    return isinstance(value, Mapping) and "value" in value and isinstance(cast("Any", value).get("name"), str)


def _one(item: Any, who: str) -> Reward:
    """A reward of a list, or one that stands alone."""
    if isinstance(item, Reward):
        return _make_reward(who, item.name, item.value, item.turn, item.agent)
    if not isinstance(item, Mapping) or "value" not in item:
        raise BadReward(
            f"{who} returned a list of something else than Reward ({_describe(item)}). Fix: return a number, a dict of "
            'named numbers, or a list of {"name": ..., "value": ...}'
        )
    given = cast("Mapping[Any, Any]", item)
    if odd := [name for name in given if name not in FIELDS]:
        raise BadReward(
            f"{who} returned a reward with {odd[0]!r} in it: it has a name, a value, and a turn or an agent"
        )
    name, turn, agent = given.get("name", "reward"), given.get("turn"), given.get("agent")
    if not isinstance(name, str) or not isinstance(turn, str | None) or not isinstance(agent, str | None):
        raise BadReward(f"{who} returned the reward {_describe(item)}: name, turn and agent are text")
    return _make_reward(who, name, given["value"], turn, agent)


def _make_reward(who: str, name: str, value: Any, turn: str | None = None, agent: str | None = None) -> Reward:
    # float() also reads text, which would hide a mistake; numpy and torch scalars have __float__, text has not.
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise BadReward(
            f"{who} returned {_describe(value)} as {name!r}. Fix: return a number, a bool, a dict of named numbers "
            "or None"
        )
    try:
        number = float(value)
    except Exception as error:  # an array, a number too large, whatever a type of the agent's own does
        raise BadReward(
            f"{who} returned {_describe(value)} as {name!r}, which is not a single number: {error}"
        ) from None
    try:
        reward = Reward(name=name, value=number, turn=turn, agent=agent)
    except ValueError as error:
        raise BadReward(f"{who} returned a bad reward: {error}") from None
    if reward.wrong:
        raise BadReward(f"{who} returned a bad reward: {reward.wrong}")
    return reward


def _describe(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return f"{type(value).__name__} {short.repr(value)}"


# -- reward functions ----------------------------------------------------------------------------------------------


def load_reward_function(spec: str) -> RewardFunction | None:
    """The reward function that `spec` names, or None if it names none. `AgentError` if it cannot be had."""
    if not spec:
        return None
    try:
        found = resolve(spec, "agent")
    except AgentError as error:
        raise AgentError("reward" + str(error).removeprefix("agent")) from error
    if not callable(found):
        raise AgentError(f"reward: {spec} is {type(found).__name__}. Fix: name a function that takes (task, answer)")
    function = cast("Callable[..., Any]", found)
    if _takes_llm(function, spec):
        return function
    if is_async(function):

        async def later(task: Task, answer: Any, llm: LLM) -> Any:
            return await function(task, answer)

        return later
    return lambda task, answer, llm: function(task, answer)


def _takes_llm(function: Callable[..., Any], spec: str) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions do not tell
        return False

    def fits(count: int) -> bool:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            return False
        return True

    if fits(2):
        return fits(3) and list(signature.parameters)[2:3] == ["llm"]
    if fits(3):
        return True
    raise AgentError(f"reward: {spec} takes {signature}. Fix: write it as f(task, answer) or f(task, answer, llm)")


async def compute_outcome(answer: Any, job: Job, reward_function: RewardFunction | None) -> Outcome:
    """What an agent's answer comes to. Whatever the reward function does wrong is an outcome, never an exception."""
    if reward_function is None:
        return _outcome(answer, "the agent")
    if not is_async(reward_function):
        return await asyncio.to_thread(compute_outcome_now, answer, job, reward_function)
    try:
        value = await reward_function(job.llm.task, answer, job.llm)
    except (Exception, SystemExit) as error:
        return _outcome_of_failure(error)
    return _outcome(value, "the reward function")


def compute_outcome_now(answer: Any, job: Job, reward_function: RewardFunction | None) -> Outcome:
    """The same in a process or thread that has no event loop to keep running."""
    if reward_function is None:
        return _outcome(answer, "the agent")
    try:
        value = run_until_done(reward_function(job.llm.task, answer, job.llm))
    except (Exception, SystemExit) as error:
        return _outcome_of_failure(error)
    return _outcome(value, "the reward function")


def _outcome(value: Any, who: str) -> Outcome:
    try:
        return Outcome(rewards=parse_rewards(value, who))
    except BadReward as error:
        return Outcome(cause="bad_reward", detail=str(error))


def _outcome_of_failure(error: BaseException) -> Outcome:
    if isinstance(error, BadReward):
        return Outcome(cause="bad_reward", detail=str(error))
    return Outcome(cause="agent_error", detail=f"the reward function failed: {last_lines(error)}")


def last_lines(error: BaseException) -> str:
    """The end of the traceback, without the frames of this folder that led to the user's code."""
    here, frames = os.path.dirname(__file__), error.__traceback__
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == here:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    text = text.encode(errors="replace").decode()  # what cannot be written as UTF-8 must not hide the error
    return text if len(text) <= MAX_DETAIL else "... " + text[-MAX_DETAIL:]
