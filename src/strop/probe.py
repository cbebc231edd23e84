"""Would this run learn anything? A few groups of it, sampled before the first step and seen as the algorithm would.

An algorithm that compares the members of a group learns nothing from one whose rewards are all the same, and a run of
such groups trains for hours on nothing. So the very rollouts that the first step would begin with are run, in a folder
that is gone afterwards, and their rewards are told.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct
from msgspec.structs import replace

from strop.config import Config, MonitorConfig
from strop.monitor.view import View
from strop.resume import sample
from strop.rooms import open_rooms, settled
from strop.run import at_work, check_rewards, compared, ended_of
from strop.types import Rollout


class Probe(Struct, kw_only=True):
    """What came of some groups. `flat` are those whose members all got the same total, `lowest` and `highest` what
    rollouts got, `failed` how many failed by cause, `seconds` how long a rollout took in the mean."""

    groups: int
    members: int
    flat: int
    mean: float
    lowest: float
    highest: float
    failed: dict[str, int]
    seconds: float

    @property
    def verdict(self) -> str:
        said = f"{self.groups - self.flat} of {self.groups} groups have rewards that differ"
        if not self.flat:
            return said
        if self.flat < self.groups:
            return f"{said}; the others teach nothing: loop.groups_most has them replaced"
        if self.highest > self.lowest:
            return f"{said}: they differ between tasks only, so nothing would be learnt; raise policy.train.temperature"
        if self.highest > 0:
            return f"{said}: every rollout got {self.highest:g}, so nothing would be learnt; take harder tasks"
        return (
            f"{said}: every rollout got {self.highest:g}, so nothing would be learnt; take easier tasks, give part of "
            "the reward for part of the way, or begin with a model that sometimes succeeds"
        )


async def probe(config: Config, view: View, *, groups: int) -> Probe:
    """Run the first `groups` groups of what `config` would train. Nothing is kept."""
    with TemporaryDirectory(prefix="strop-probe-") as place:
        config = settings(settled(config), groups, Path(place) / "run")
        view.title(f"probing {config.policy.model}", 0)
        async with open_rooms(config, view, resume=False) as run:
            wanted = run.next_rollouts(groups)
            began = time.monotonic()
            ended = await at_work(run, ended_of(run, wanted, "probing"))
            ended = [one.rollout for one in await compared(run, [await sample(run, rollout) for rollout in ended])]
            check_rewards(run, ended)
            waited = (time.monotonic() - began) * min(config.runner.workers, len(ended)) / len(ended)
            return judged(ended, config.algorithm.rewards, waited)


def settings(config: Config, groups: int, folder: Path) -> Config:
    """A configuration for some groups and nothing else: no evaluation, a store of its own, nobody who is told of
    metrics."""
    return replace(
        config,
        folder=str(folder),
        loop=replace(config.loop, eval_splits=(), staleness=0, groups=groups),
        store=replace(config.store, url=""),
        monitor=MonitorConfig(),
    )


def judged(ended: Sequence[Rollout], weights: dict[str, float], seconds: float) -> Probe:
    totals: dict[str, list[float]] = {}
    for rollout in ended:
        total = sum(weight * (rollout.reward(name) or 0.0) for name, weight in weights.items())
        totals.setdefault(rollout.group, []).append(total)
    every = [total for group in totals.values() for total in group]
    return Probe(
        groups=len(totals),
        members=max(map(len, totals.values())),
        flat=sum(min(group) == max(group) for group in totals.values()),
        mean=sum(every) / len(every),
        lowest=min(every),
        highest=max(every),
        failed=dict(Counter(str(rollout.cause) for rollout in ended if rollout.cause)),
        seconds=seconds,
    )
