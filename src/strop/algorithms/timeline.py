"""Timelines: time runs along one agent of one rollout, turns by request start."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from strop.trajectory import Batch
from strop.types import Turn


@dataclass(frozen=True)
class Timeline:
    """The turns of one trained agent in one rollout. Turns that overlap share a moment, as do the choices of one
    request: none of them came after another. Abandoned turns never reached the agent and are not part of it."""

    sample: int
    agent: int
    moments: list[list[Turn]]


def build_timelines(batch: Batch) -> list[Timeline]:
    """Every timeline of the samples that are in the baseline, also of those that have no entries."""
    found: list[Timeline] = []
    for s in np.flatnonzero(batch.counted):
        spoken: dict[str, list[Turn]] = defaultdict(list)
        for turn in batch.samples[s].turns:
            if turn.response_ids and not turn.abandoned:
                spoken[turn.agent].append(turn)
        found += [Timeline(int(s), a, _moments(spoken[name])) for a, name in enumerate(batch.agents) if name in spoken]
    return found


def _moments(turns: Iterable[Turn]) -> list[list[Turn]]:
    moments: list[list[Turn]] = []
    until = -math.inf
    for turn in sorted(turns, key=lambda t: (t.started, t.choice, t.id)):
        if moments and (turn.started < until or turn.started == moments[-1][-1].started):
            moments[-1].append(turn)
        else:
            moments.append([turn])
        until = max(until, turn.ended)
    return moments
