"""What a step takes of the data becomes ended rollouts of the run: from here on they are like any others.

    data.jsonl ──▶ begin, add turns, finish ──▶ the run's store ──▶ samples

Durability, resuming, replay and `strop rollouts` need no cases of their own. Copies say so: the version of their turns
is `data`, by which they are never taken for what the present weights sampled; their sampling is at temperature 1, so
that greedy and truncated answers may be learnt from too; a rollout's `detail` says where it comes from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from strop.gateway.contexts import turn_number
from strop.run.data.dataset import DataSample, DataSet
from strop.run.rollouts import find_stored, read_samples
from strop.run.state import Collected, Run
from strop.store.base import Store
from strop.tasks.sampling import group_number
from strop.types import DATA, Event, Exclusion, Lease, Reward, Rollout, Sampling, Turn

RUNNER, SECONDS = "data", 1e9
"""Who holds a rollout while it is written. That it never was finished is noticed when the run is resumed."""


async def collect_stored(run: Run, data: DataSet) -> Collected:
    """Consumes data; produces the next step's rollouts as samples. Those that are in the store already stay."""
    began, wanted = time.monotonic(), run.next_rollouts()
    run.view.phase(f"reading step {run.step + 1}", 0, len(wanted))
    there = await find_stored(run.store, wanted)
    await asyncio.gather(*(_begin(run.store, data, rollout) for rollout in wanted if rollout.id not in there))
    there |= await find_stored(run.store, [rollout for rollout in wanted if rollout.id not in there])
    samples = await read_samples(run.store, [there[rollout.id] for rollout in wanted])
    assert all(sample.rollout.status == "succeeded" for sample in samples), "a copy that was never finished"
    return Collected(samples, {}, time.monotonic() - began)


async def finish_begun(store: Store, data: DataSet) -> None:
    """Copies that were being written when a run was killed have been queued again: finish them before an agent may take
    one up. What agents are to run goes back to the queue."""
    queued = (await store.count_open())["queued"]
    for lease in await store.lease(RUNNER, seconds=SECONDS, count=queued) if queued else ():
        if lease.rollout.mode == "train":
            await _finish(store, data, lease)
        else:
            await store.finish(lease.rollout.id, lease.attempt.number, cause="interrupted")


async def _begin(store: Store, data: DataSet, rollout: Rollout) -> None:
    await _finish(store, data, await store.begin(rollout, RUNNER, seconds=SECONDS))


async def _finish(store: Store, data: DataSet, lease: Lease) -> None:
    id, attempt = lease.rollout.id, lease.attempt.number
    sample = data.read(group_number(id))[lease.rollout.member]
    turns = sample.whole_turns()
    names = {turn.id: f"{id}/{attempt}/{turn_number(turn.id)}" for turn in turns}
    if turns:
        await store.add_turns([copy_turn(turn, names, id, attempt) for turn in turns])
    excluded = [(_name(turn, names), reason) for turn, reason in sample.excluded.items()]
    await store.add_events([exclude(id, attempt, turn, reason) for turn, reason in excluded])
    rewards = name_turns(sample.rewards, names)
    await store.finish(id, attempt, rewards=rewards, detail=describe_source(data, sample))


def copy_turn(turn: Turn, names: dict[str, str], rollout: str, attempt: int) -> Turn:
    """A turn under its new name; its tokens, messages and answer stay."""
    return replace(
        turn,
        id=names[turn.id],
        rollout=rollout,
        attempt=attempt,
        parent=names.get(turn.parent or ""),
        versions=[(0, DATA)] if turn.response_ids else [],
        sampling=Sampling(max_tokens=turn.sampling.max_tokens),
    )


def exclude(rollout: str, attempt: int, turn: str, reason: str) -> Event:
    data = msgspec.to_builtins(Exclusion(turn=turn, reason=reason))
    return Event(id=f"copied/{turn}", rollout=rollout, attempt=attempt, kind="exclude", data=data, time=time.time())


def name_turns(rewards: Sequence[Reward], names: dict[str, str]) -> list[Reward]:
    """Rewards with the turns' new names."""
    return [replace(reward, turn=_name(reward.turn, names)) if reward.turn else reward for reward in rewards]


def _name(turn: str, names: dict[str, str]) -> str:
    """A turn's new name. One that is not there has a name that no turn has, and is counted as such by the step."""
    return names.get(turn, f"{DATA}:{turn}")


def describe_source(data: DataSet, sample: DataSample) -> str:
    return f"copied from {data.header.sources[sample.source]}, {sample.rollout}"
