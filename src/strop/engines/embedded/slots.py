"""Which tokens' keys lie in which slot: who may take one, and what of it need not be computed again.

A slot's keys were computed with one policy's weights, its owner's, and are of use to no other policy. A slot that was
let go keeps its keys until the slot is needed, the one unused longest first. A new prompt gets the slot whose tokens it
continues, or a copy of what another slot shares with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORTHWHILE = 16
"""A shorter common beginning is computed again rather than copied or waited for."""


@dataclass(frozen=True)
class SlotPlacement:
    """Where a prompt goes. Its first `reused` tokens are there already, or in row `source` if that is given."""

    row: int
    reused: int = 0
    source: int | None = None


@dataclass(frozen=True)
class SharedPrefix:
    """What a prompt has in common with each row, from its beginning and without its last token, which must be run for
    its logits: how many tokens' keys are `there` [rows], and the most that some row, now being filled, will have."""

    there: np.ndarray
    coming: int = 0


class Slots:
    """The ledger of the cache's rows. A row in use has its whole prompt in `_ids`, of which `filled` have keys."""

    def __init__(self, rows: int, width: int, *, reuse: bool) -> None:
        self.filled = np.zeros(rows, np.int64)
        self._owner = np.zeros(rows, np.int64)
        self._known = np.zeros(rows, np.int64)  # tokens in `_ids`, at least those that are filled
        self._free = np.ones(rows, bool)
        self._reuse = reuse
        self._ids = np.zeros((rows, width), np.int32)
        self._used = np.zeros(rows, np.int64)
        self._clock = 0

    @property
    def free(self) -> list[int]:
        return np.flatnonzero(self._free).tolist()

    @property
    def full(self) -> bool:
        return not self._free.any()

    def shared(self, prompt: np.ndarray, owner: int = 0) -> SharedPrefix:
        width = min(len(prompt) - 1, int(self._known.max()))
        if not self._reuse or width <= 0:
            return SharedPrefix(np.zeros_like(self.filled))
        other = self._ids[:, :width] != prompt[:width]
        common = np.minimum(np.where(other.any(1), other.argmax(1), width), self._known)
        common[self._owner != owner] = 0
        return SharedPrefix(np.minimum(common, self.filled), int(common[self._known > self.filled].max(initial=0)))

    def choose(self, shared: SharedPrefix) -> SlotPlacement:
        """The best place for a prompt. There must be a free row."""
        oldest = int(np.where(self._free, self._used, np.iinfo(np.int64).max).argmin())
        reused = int(shared.there.max())
        # of the rows that have as much, one that is free, with the least after it
        best = int(np.lexsort((self.filled, ~self._free, -shared.there))[0])
        lost = int(self.filled[best]) - reused
        if self._free[best] and reused > 0 and (best == oldest or lost <= self.filled[oldest]):
            return SlotPlacement(best, reused)
        if reused >= WORTHWHILE:
            return SlotPlacement(oldest, reused, best)
        return SlotPlacement(oldest, int(shared.there[oldest]))

    def take(self, place: SlotPlacement, prompt: np.ndarray, owner: int = 0) -> None:
        self._free[place.row] = False
        self._owner[place.row] = owner
        self._ids[place.row, : len(prompt)] = prompt
        self._known[place.row] = len(prompt)
        self.filled[place.row] = place.reused

    def fill(self, written: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keys of ids were written after what their rows had; each row comes once."""
        single = [(row, ids[0]) for row, ids in written if len(ids) == 1]
        if single:  # those that decode, which are many
            rows, last = np.array(single).T
            self._ids[rows, self.filled[rows]] = last
            self.filled[rows] += 1
        for row, ids in written:
            if len(ids) > 1:
                start = int(self.filled[row])
                self._ids[row, start : start + len(ids)] = ids
                self.filled[row] = start + len(ids)
        np.maximum(self._known, self.filled, out=self._known)

    def let_go(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock
        self._known[row] = self.filled[row]
        self._free[row] = True

    def forget(self, row: int | slice | np.ndarray = slice(None)) -> None:
        """The keys that lie there mean nothing any more."""
        self.filled[row] = 0
        self._used[row] = 0
        self._known[self._free] = self.filled[self._free]

    def forget_owner(self, owner: int) -> None:
        """The keys that a policy's weights computed mean nothing any more."""
        self.forget(self._owner == owner)
