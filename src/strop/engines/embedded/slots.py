"""Which tokens' keys lie in which slot: who may take one, and what of it need not be computed again.

A slot that was let go keeps its keys until somebody needs the room, the one unused longest first. A new prompt gets the
slot whose tokens it continues, or a copy of what another slot shares with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORTHWHILE = 16
"""A shorter common beginning is computed again rather than copied or waited for."""


@dataclass(frozen=True)
class Place:
    """Where a prompt goes. Its first `reused` tokens are there already, or in row `source` if that is given."""

    row: int
    reused: int = 0
    source: int | None = None


class Slots:
    """The ledger of the cache's rows."""

    def __init__(self, rows: int, width: int, *, reuse: bool) -> None:
        self.filled = np.zeros(rows, np.int64)
        self.free: set[int] = set(range(rows))
        self._reuse = reuse
        self._ids = np.zeros((rows, width), np.int32)
        self._used = np.zeros(rows, np.int64)
        self._clock = 0

    def shared(self, prompt: np.ndarray) -> np.ndarray:
        """How many tokens each row has in common with the beginning of `prompt`, its last token left out: that one
        must be run again for its logits. [rows]"""
        if not self._reuse:
            return np.zeros_like(self.filled)
        width = min(len(prompt) - 1, int(self.filled.max()))
        if width <= 0:
            return np.zeros_like(self.filled)
        other = self._ids[:, :width] != prompt[:width]
        common = np.where(other.any(1), other.argmax(1), width)
        return np.minimum(common, self.filled)

    def choose(self, shared: np.ndarray) -> Place:
        """The best place for a prompt that has `shared` in common with each row. There must be a free row."""
        oldest = min(self.free, key=lambda row: (self._used[row], row))
        best = max(range(len(shared)), key=lambda row: (shared[row], row in self.free, -self.filled[row]))
        reused = int(shared[best])
        lost = int(self.filled[best]) - reused
        if best in self.free and reused > 0 and (best == oldest or lost <= self.filled[oldest]):
            return Place(best, reused)
        if reused >= WORTHWHILE:
            return Place(oldest, reused, best)
        return Place(oldest, int(shared[oldest]))

    def take(self, place: Place) -> None:
        if place.source is not None:
            self._ids[place.row, : place.reused] = self._ids[place.source, : place.reused]
        self.free.remove(place.row)
        self.filled[place.row] = place.reused

    def fill(self, row: int, ids: Sequence[int]) -> None:
        """The keys of `ids` were written behind what the row had."""
        start = int(self.filled[row])
        self._ids[row, start : start + len(ids)] = ids
        self.filled[row] = start + len(ids)

    def let_go(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock
        self.free.add(row)

    def forget(self, row: int | slice = slice(None)) -> None:
        """What lies there means nothing any more."""
        self.filled[row] = 0
        self._used[row] = 0
