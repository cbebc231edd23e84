"""Rewards relative to a group: given by the loop, after all members ended and before credit.

    group of ended rollouts ──▶ function(task, answers) ──▶ one reward for each member ──▶ store.add_rewards

The function is named by `group_reward`, and may be `async`. It gets the task and, for each member in order, the text
of its last turn, or None for one that did not succeed; with a third parameter, `samples`, also the rollouts with all
their turns. For each member it returns what an agent may return. What members that did not succeed would get is left
out. Once recorded, rewards stay: a run that is resumed does not ask again, and goes on with the same numbers.

Left out: evaluations, whose rollouts are not compared with each other.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from strop.agent.functions import is_async
from strop.errors import AgentError, BadReward
from strop.imports import one_line, resolve
from strop.monitor.transcripts import list_message_texts
from strop.runners.rewards import parse_rewards
from strop.store.base import Store
from strop.trajectory import Sample

GroupReward = Callable[..., Any]


def load(spec: str) -> GroupReward | None:
    """The function that `spec` names, as one of (task, answers, samples), or None if it names none."""
    if not spec:
        return None
    try:
        found = resolve(spec, "agent")
    except AgentError as error:
        raise AgentError("group_reward" + str(error).removeprefix("agent")) from error
    count = len(inspect.signature(found).parameters) if callable(found) else 0
    if count not in (2, 3):
        raise AgentError(f"group_reward: {spec} is not a function of a group. Fix: write it as f(task, answers)")
    function = cast("GroupReward", found)

    async def ask(*given: Any) -> Any:
        given = given[:count]
        return await (function(*given) if is_async(function) else _in_a_thread(function, *given))

    return ask


def _in_a_thread(function: GroupReward, *given: Any) -> asyncio.Future[Any]:
    """Like asyncio.to_thread, in a thread that no exit waits for: somebody's function may never return."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(give: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            give(value)

    def work() -> None:
        try:
            given_back = (done.set_result, function(*given))
        except StopIteration:  # which no future can hold
            given_back = (done.set_exception, RuntimeError("StopIteration was raised"))
        except BaseException as error:
            given_back = (done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *given_back)

    threading.Thread(target=work, name="group-reward", daemon=True).start()
    return done


async def give(store: Store, samples: Sequence[Sample], function: GroupReward) -> list[Sample]:
    """The same samples with the rewards of their groups, which are recorded first where they are not yet."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.rollout.group, []).append(sample)
    asked = (_give(store, members, function) for members in groups.values())
    for came in await asyncio.gather(*asked, return_exceptions=True):  # what others gave is kept, whoever fails
        if came is not None:
            raise came
    return [Sample(await store.get(sample.rollout.id), sample.turns) for sample in samples]


async def _give(store: Store, members: list[Sample], function: GroupReward) -> None:
    group, succeeded = members[0].rollout.group, [one for one in members if one.rollout.status == "succeeded"]
    if not succeeded or any([await _given(store, member.rollout.id) for member in succeeded]):
        return
    answers = [_answer(member) for member in members]
    try:
        values = list(await function(members[0].rollout.task, answers, members))
        if len(values) != len(members):
            raise BadReward(f"it returned {len(values)} rewards for {len(members)} members")
        rewards = [parse_rewards(value, "the function") for value in values]
    except Exception as error:
        raise AgentError(
            f"group_reward: group {group} got no rewards ({one_line(error)}). Fix: correct the function, then resume"
        ) from error
    named = {member.rollout.id: given for member, given in zip(members, rewards, strict=True) if member in succeeded}
    await store.add_rewards(named)


async def _given(store: Store, rollout: str) -> bool:
    return any(event.id.startswith("afterwards/") for event in await store.events(rollout))


def _answer(member: Sample) -> str | None:
    if member.rollout.status != "succeeded":
        return None
    return "\n".join(list_message_texts(member.turns[-1].answer)) if member.turns else ""
