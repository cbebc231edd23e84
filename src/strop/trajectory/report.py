"""How exactly a batch's prompts extended each other, and what the token tree saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.trajectory.entries import Batch
from strop.trajectory.tree import Piece


@dataclass(frozen=True)
class Exactness:
    """A count of trained turns by how their prompt came about, and of tokens.

    `extensions` grew a served context token for token, `branches` could not and say why, the rest opened a context.

    >>> Exactness(turns=3, extensions=1, branches={"edited": 1}, tokens=300, unique_tokens=150).metrics()["tree/shared"]
    0.5
    """

    turns: int
    extensions: int
    branches: dict[str, int] = field(default_factory=dict[str, int])
    tokens: int = 0
    unique_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """As metrics; `tree/shared` is the fraction of tokens that needed no computation of their own."""
        return {
            "tree/turns": float(self.turns),
            "tree/extensions": float(self.extensions),
            "tree/branches": float(sum(self.branches.values())),
            **{f"tree/branches/{reason}": float(n) for reason, n in sorted(self.branches.items())},
            "tree/tokens": float(self.tokens),
            "tree/unique_tokens": float(self.unique_tokens),
            "tree/shared": 1.0 - self.unique_tokens / self.tokens if self.tokens else 0.0,
        }


def exactness(batch: Batch, pieces: Sequence[Piece]) -> Exactness:
    branches = Counter(turn.branch for turn in batch.turns if turn.branch is not None)
    extensions = sum(turn.branch is None and turn.parent is not None and turn.shared > 0 for turn in batch.turns)
    return Exactness(
        turns=len(batch.turns),
        extensions=extensions,
        branches=dict(branches),
        tokens=sum(len(path) for path in batch.paths),
        unique_tokens=sum(len(piece.ids) for piece in pieces),
    )
