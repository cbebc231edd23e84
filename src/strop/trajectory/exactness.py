"""How exactly a batch's turns follow from each other, and what that saves: for people, and as metrics.

A turn extends a context that was served before, token for token, or begins a branch and says why. Tokens that turns
share are computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strop.trajectory.batch import Sample
from strop.trajectory.token_tree import count_shared
from strop.types import Turn


@dataclass(frozen=True)
class Break:
    """Where a turn left the contexts served before it: of its prompt only the first `shared` tokens were known."""

    turn: str
    reason: str
    shared: int
    prompt: int


@dataclass(frozen=True)
class Exactness:
    """`turns` have tokens: `first` of them open a conversation, `extended` go on from a served context exactly, the
    others are `breaks`. `tokens` are all they have, `unique` those left if every shared prefix counts once."""

    turns: int
    first: int
    extended: int
    breaks: list[Break]
    tokens: int
    unique: int

    @property
    def reasons(self) -> Counter[str]:
        return Counter(found.reason for found in self.breaks)

    def metrics(self) -> dict[str, float]:
        again = self.extended + len(self.breaks)
        return {
            "session/exact": float(self.extended),
            **({"session/exact_share": self.extended / again} if again else {}),
            **{f"session/{reason}": float(count) for reason, count in sorted(self.reasons.items())},
        }


def exactness(samples: Sequence[Sample]) -> Exactness:
    """Of all turns that have tokens, of any agent."""
    turns = [turn for sample in samples for turn in sample.turns if not turn.outside]
    by_id = {turn.id: turn for turn in turns}
    reasons = {turn.id: reason for turn in turns if (reason := _reason(turn, by_id)) is not None}
    breaks = [Break(t.id, reasons[t.id], t.shared, len(t.prompt_ids)) for t in turns if t.id in reasons]
    extended = sum(turn.parent is not None and turn.id not in reasons for turn in turns)
    return Exactness(
        turns=len(turns),
        first=len(turns) - extended - len(breaks),
        extended=extended,
        breaks=breaks,
        tokens=sum(len(turn.ids) for turn in turns),
        unique=_unique(turns),
    )


def _unique(turns: Sequence[Turn]) -> int:
    """Nodes of the tree of all paths: in sorted order each path adds what it does not share with the one before."""
    count, before = 0, np.empty(0, np.int64)
    for path in (np.array(ids, np.int64) for ids in sorted(turn.ids for turn in turns)):
        count += len(path) - count_shared(path, before)
        before = path
    return count


def _reason(turn: Turn, by_id: Mapping[str, Turn]) -> str | None:
    """Why a turn does not extend a served context, or None. What it says of its parent is not taken on trust; training
    never looks at it, since contexts are found by comparing ids."""
    parent = by_id.get(turn.parent) if turn.parent is not None else None
    if parent is not None and parent.ids[: turn.shared] != turn.prompt_ids[: turn.shared]:
        return "disagrees"
    return turn.branch
