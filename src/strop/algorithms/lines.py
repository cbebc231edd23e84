"""Time: it runs along one agent of one rollout, turns by request start."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from strop.trajectory import Batch
from strop.types import Turn


@dataclass(frozen=True)
class Line:
    """What one trained agent was told in one rollout, in time. Turns that overlap share a place, as do the choices of
    one request: none of them came after another. Abandoned turns never reached the agent and are not part of time."""

    sample: int
    agent: int
    places: list[list[Turn]]


def lines(batch: Batch) -> list[Line]:
    """Every line of the samples that are in the baseline, also of those that have no entries."""
    found: list[Line] = []
    for s in np.flatnonzero(batch.counted):
        spoken: dict[str, list[Turn]] = defaultdict(list)
        for turn in batch.samples[s].turns:
            if turn.response_ids and not turn.abandoned:
                spoken[turn.agent].append(turn)
        found += [Line(int(s), a, _places(spoken[name])) for a, name in enumerate(batch.agents) if name in spoken]
    return found


def _places(turns: Iterable[Turn]) -> list[list[Turn]]:
    places: list[list[Turn]] = []
    until = -math.inf
    for turn in sorted(turns, key=lambda t: (t.started, t.choice, t.id)):
        if places and (turn.started < until or turn.started == places[-1][-1].started):
            places[-1].append(turn)
        else:
            places.append([turn])
        until = max(until, turn.ended)
    return places
