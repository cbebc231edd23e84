"""A run's rollouts as its store has them."""

from __future__ import annotations

from collections.abc import Sequence

from strop.run.state import Run
from strop.store.base import Store
from strop.trajectory import Sample
from strop.types import Rollout

PAGE = 1000
MANY = 32
"""Rollouts whose turns are read at once: others read in between."""


async def read_samples(store: Store, ended: Sequence[Rollout]) -> list[Sample]:
    """Rollouts that have ended, with their turns."""
    samples: list[Sample] = []
    for first in range(0, len(ended), MANY):
        some = ended[first : first + MANY]
        turns = await store.turns_of([(rollout.id, rollout.attempts) for rollout in some])
        samples += map(Sample, some, turns)
    return samples


async def find_stored(store: Store, wanted: Sequence[Rollout]) -> dict[str, Rollout]:
    """What the store has of these rollouts, by id. A group may have others too, where loop.eval_samples was changed."""
    ids, found = [rollout.id for rollout in wanted], dict[str, Rollout]()
    for group in dict.fromkeys(rollout.group for rollout in wanted):
        page = await store.list(group=group, limit=PAGE)
        found |= {rollout.id: rollout for rollout in page}
        while len(page) == PAGE:
            page = await store.list(group=group, after=page[-1].id, limit=PAGE)
            found |= {rollout.id: rollout for rollout in page}
    return {id: found[id] for id in ids if id in found}


async def find_superseded(run: Run) -> dict[str, str]:
    """Earlier rollouts in the place of the next step's, sampled from weights that are no more: left out, and counted by
    name."""
    before, limit = range(1, run.origin), run.config.loop.group_size
    if not before:
        return {}
    here = {rollout.group for rollout in run.next_rollouts()}
    groups = {rollout.group for lineage in before for rollout in run.next_rollouts(origin=lineage)} - here
    return {
        rollout.id: "superseded" for name in sorted(groups) for rollout in await run.store.list(group=name, limit=limit)
    }
