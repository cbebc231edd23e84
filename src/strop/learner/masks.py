"""What grammars allowed of the tokens of a batch: the engine's masks once more, from the turns themselves.

    turn with Sampling.grammar ──TokenMatcher over its tokens──▶ a mask for each of its entries

Logits of what it does not allow are left out (logprobs.py).

A mask belongs to an entry and not to a place in the tree: two turns may share the place and have different grammars.
Many are the same, so each is kept once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strop.models.grammar import TokenMatcher, Words
from strop.trajectory import Batch
from strop.trajectory.batch import Ints

ALL = np.uint32(0xFFFFFFFF)


class EntryMasks:
    """Of the entries of one batch."""

    def __init__(self, which: Ints, masks: Words) -> None:
        self._which, self._masks = which, masks  # of each entry, among those that there are; the first allows all

    @staticmethod
    def of(batch: Batch, model: Path, vocabulary: int) -> EntryMasks | None:
        """None where no turn has a grammar."""
        held = [t for t, turn in enumerate(batch.turns) if turn.sampling.grammar is not None]
        if not held:
            return None
        which = np.zeros(len(batch.entries), np.int64)
        places: dict[bytes, int] = {np.full(-(-vocabulary // 32), ALL).tobytes(): 0}
        for t in held:
            grammar = batch.turns[t].sampling.grammar
            assert grammar is not None
            matcher = TokenMatcher(model, vocabulary, grammar)
            for row in batch.rows(t):
                which[row] = places.setdefault(matcher.find_allowed().tobytes(), len(places))
                matcher.take(int(batch.entries.target[row]))
        return EntryMasks(which, np.frombuffer(b"".join(places), np.uint32).reshape(len(places), -1))

    def take(self, entries: Ints, device: torch.device) -> Tensor | None:
        """Those of some entries, [entries, words]; None where all of them may be anything."""
        which = self._which[entries]
        if not which.any():
            return None
        return torch.from_numpy(self._masks[which].view(np.int32)).to(device)

