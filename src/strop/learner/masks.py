"""What grammars allowed of the tokens of a batch: the engine's masks once more, from the turns themselves.

    turn with Sampling.grammar ──TokenMatcher over its tokens──▶ a mask for each of its entries

Logits of what it does not allow are left out (logprobs.py).

A mask belongs to an entry and not to a place in the tree: two turns may share the place and have different grammars.
Many are the same, so each is kept once. A batch is scored and then trained on: its masks are found once.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strop.errors import LearnerError
from strop.models.grammar import OutOfGrammar, TokenMatcher, Words
from strop.trajectory import Batch
from strop.trajectory.batch import Ints

ALL = np.uint32(0xFFFFFFFF)


class EntryMasks:
    """Of the entries of one batch."""

    def __init__(self, about: bytes, which: Ints, masks: Words) -> None:
        self._about = about  # of which batch
        self._which, self._masks = which, masks  # of each entry, among those that there are; the first allows all

    @staticmethod
    def of(batch: Batch, model: Path, vocabulary: int, before: EntryMasks | None = None) -> EntryMasks | None:
        """None where no turn has a grammar; those from `before` if they are of this very batch."""
        if all(turn.sampling.grammar is None for turn in batch.turns):
            return None
        about = _describe(batch)
        if before is not None and before._about == about:
            return before
        which = np.zeros(len(batch.entries), np.int64)
        places: dict[bytes, int] = {np.full(-(-vocabulary // 32), ALL).tobytes(): 0}
        for t, turn in enumerate(batch.turns):
            if turn.sampling.grammar is None:
                continue
            matcher = TokenMatcher(model, vocabulary, turn.sampling.grammar)
            try:
                for row in batch.rows(t):
                    which[row] = places.setdefault(matcher.find_allowed().tobytes(), len(places))
                    matcher.take(int(batch.entries.target[row]))
            except OutOfGrammar as error:
                raise LearnerError(f"turn {turn.id} is not one that its engine can have drawn: {error}") from None
        return EntryMasks(about, which, np.frombuffer(b"".join(places), np.uint32).reshape(len(places), -1))

    def take(self, entries: Ints, device: torch.device) -> Tensor | None:
        """Those of some entries, [entries, words]; None where all of them may be anything."""
        which = self._which[entries]
        if not which.any():
            return None
        return torch.from_numpy(self._masks[which].view(np.int32)).to(device)


def _describe(batch: Batch) -> bytes:
    """A fingerprint of the entries and of what they were held to."""
    digest = blake2b(batch.starts.tobytes(), digest_size=16)
    digest.update(batch.entries.target.tobytes())
    for turn in batch.turns:
        digest.update(repr(turn.sampling.grammar).encode())
    return digest.digest()
