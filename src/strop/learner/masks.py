"""What grammars allowed of the tokens of a batch: the engine's masks once more, from the turns themselves.

    turn with Sampling.grammar ──TokenMatcher over its tokens──▶ a mask for each of its entries

Logits of what it does not allow are left out (logprobs.py).

A mask belongs to an entry and not to a place in the tree: two turns may share the place and have different grammars.
Many are the same, so each is kept once. A batch is scored and then trained on: its masks are found once. Turns that
carry no loss anyway have none.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strop.errors import LearnerError
from strop.models.grammar import BadSchema, GrammarLimit, OutOfGrammar, TokenMatcher, Words
from strop.trajectory import Batch
from strop.trajectory.batch import Ints
from strop.types import AnswerGrammar, Turn

ALL = np.uint32(0xFFFFFFFF)


class EntryMasks:
    """Of the entries of one batch."""

    def __init__(self, about: bytes, turns: frozenset[int], lost: list[int], which: Ints, masks: Words) -> None:
        self._about, self._turns = about, turns  # of which batch, and of which of its turns
        self.lost = lost  # those among them whose grammars came to the library's limit
        self._which, self._masks = which, masks  # of each entry, among those that there are; the first allows all

    @staticmethod
    def of(batch: Batch, model: Path, vocabulary: int, before: EntryMasks | None = None) -> EntryMasks | None:
        """None where no turn that may carry loss has a grammar; those from `before` if they are of this very batch."""
        held = zip(batch.turns, batch.skipped, strict=True)
        turns = frozenset(t for t, (turn, why) in enumerate(held) if turn.sampling.grammar is not None and why is None)
        if not turns:
            return None
        about = _describe(batch)
        if before is not None and before._about == about and turns <= before._turns:
            return before
        which = np.zeros(len(batch.entries), np.int64)
        places: dict[bytes, int] = {np.full(-(-vocabulary // 32), ALL).tobytes(): 0}
        firsts: dict[AnswerGrammar, TokenMatcher] = {}
        lost: list[int] = []
        for t in sorted(turns):
            rows, turn = batch.rows(t), batch.turns[t]
            try:
                matcher = _begin(firsts, turn, model, vocabulary)
                for row in rows:
                    which[row] = places.setdefault(matcher.find_allowed().tobytes(), len(places))
                    matcher.take(int(batch.entries.target[row]))
            except GrammarLimit:
                which[rows] = 0
                lost.append(t)
            except (OutOfGrammar, BadSchema) as error:
                raise LearnerError(
                    f"turn {turn.id} is not one that its engine can have drawn: {error}. Fix: install the version of "
                    f"llguidance that it was drawn with, {turn.sampling.grammar and turn.sampling.grammar.version}, or "
                    "begin a new run"
                ) from None
        masks = np.frombuffer(b"".join(places), np.uint32).reshape(len(places), -1)
        return EntryMasks(about, turns, lost, which, masks)

    def take(self, entries: Ints, device: torch.device) -> Tensor | None:
        """Those of some entries, [entries, words]; None where all of them may be anything."""
        which = self._which[entries]
        if not which.any():
            return None
        return torch.from_numpy(self._masks[which].view(np.int32)).to(device)


def _begin(firsts: dict[AnswerGrammar, TokenMatcher], turn: Turn, model: Path, vocabulary: int) -> TokenMatcher:
    """A matcher for a turn. Each grammar is compiled once, unless an answer came to its limit."""
    grammar = turn.sampling.grammar
    assert grammar is not None
    if (first := firsts.get(grammar)) is None or first.spent:
        first = firsts[grammar] = TokenMatcher(model, vocabulary, grammar)
    return first.copy()


def _describe(batch: Batch) -> bytes:
    """A fingerprint of the entries and of what they were held to."""
    digest = blake2b(batch.starts.tobytes(), digest_size=16)
    digest.update(batch.entries.target.tobytes())
    for turn in batch.turns:
        digest.update(repr(turn.sampling.grammar).encode())
    return digest.digest()
