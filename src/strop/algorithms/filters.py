"""What is left out of the loss on purpose, after the baselines, so that nothing left out biases them.

    overlong         answers that were cut off at their length: the rollout is dropped, the turn is masked, or the
                     rollout's reward is lowered before any baseline (`overlong_penalties`)
    malformed_call   turns with tool calls that could not be read
    turn_cap         turns beyond the most that are trained of one rollout
    too_stale        rollouts sampled from weights that are too old
    zero_variance, group_of_one   turns that an algorithm finds to teach nothing (`leave_out`)

Advantages stay as they are. The first reason stays too, and what is dropped already is not looked at again. A rollout
left without a turn is dropped for the reason that took the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from strop.algorithms.metrics import summarize
from strop.trajectory import Batch
from strop.trajectory.batch import Floats
from strop.types import Turn, stable_hash

Overlong = Literal["keep", "drop", "mask", "penalise"]


def find_overlong(batch: Batch) -> Floats:
    """1 for each sample in which a trained agent was cut off, else 0."""
    return np.array(
        [any(t.finish == "length" and t.agent in batch.agents for t in s.turns) for s in batch.samples], np.float64
    )


def filter_batch(batch: Batch, *, overlong: Overlong, malformed: bool, max_turns: int | None) -> None:
    """Drop rollouts and skip turns as configured."""
    if overlong == "drop":
        for s in np.flatnonzero(find_overlong(batch)):
            batch.drop(int(s), "overlong")
    if overlong == "mask":
        skip_turns(batch, [t for t, turn in enumerate(batch.turns) if turn.finish == "length"], "overlong")
    if malformed:
        bad = [t for t, turn in enumerate(batch.turns) if turn.answer.get("malformed_calls", 0) > 0]
        skip_turns(batch, bad, "malformed_call")
    if max_turns is not None:
        skip_turns(batch, _beyond(batch, max_turns), "turn_cap")


def leave_out(batch: Batch, reasons: Sequence[str | None]) -> None:
    """Leave out the turns that have a reason: the rollout where nothing else of it would be trained, otherwise these
    turns of it."""
    owner = batch.owners()
    for s in map(int, np.unique(owner)):
        still = [int(t) for t in np.flatnonzero(owner == s) if batch.skipped[t] is None]
        given = {t: why for t in still if (why := reasons[t]) is not None}
        if given and len(given) == len(still):
            batch.drop(s, given[still[0]])
        else:
            for t, why in given.items():
                batch.skipped[t] = why
                batch.entries.trainable[batch.rows(t)] = False


def drop_stale(batch: Batch, version_number: int, limit: int) -> dict[str, float]:
    """Drop the rollouts with a token sampled more than `limit` versions before `version_number`, the number of the
    version being trained, and return metrics. A resumed run goes on with the numbers of the lineage before, so numbers
    can be compared across lineages."""
    numbers = np.array([_oldest(turn) for turn in batch.turns], np.int64)
    owner = batch.owners()
    samples = np.unique(owner)
    staleness = np.array([version_number - numbers[owner == s].min() for s in samples], np.float64)
    for s in samples[staleness > limit]:
        batch.drop(int(s), "too_stale")
    return summarize("training/off_policy/staleness", staleness)


def _beyond(batch: Batch, max_turns: int) -> list[int]:
    """The turns to leave out of rollouts that have more. Which ones depends on the rollout's id and on nothing else."""
    trainable: dict[int, list[int]] = defaultdict(list)
    for t, s in enumerate(batch.owners()):
        if batch.skipped[t] is None:
            trainable[int(s)].append(t)
    beyond: list[int] = []
    for s, turns in trainable.items():
        id, first = batch.samples[s].rollout.id, turns[0]
        beyond += sorted(turns, key=lambda t: stable_hash(id, t - first))[max_turns:]
    return beyond


def skip_turns(batch: Batch, turns: Iterable[int], reason: str) -> None:
    """Leave turns out of the loss; a rollout that has no other left is dropped."""
    owner = batch.owners()
    touched: set[int] = set()
    for t in turns:
        s = int(owner[t])
        if batch.skipped[t] is None and batch.samples[s].rollout.id not in batch.dropped:
            batch.skipped[t] = reason
            batch.entries.trainable[batch.rows(t)] = False
            touched.add(s)
    for s in sorted(touched):
        if all(batch.skipped[t] is not None for t in np.flatnonzero(owner == s)):
            batch.drop(s, reason)


def _oldest(turn: Turn) -> int:
    assert turn.versions, f"turn {turn.id} does not say which version sampled it"
    return min(int(version.partition(".")[2]) for _, version in turn.versions)
