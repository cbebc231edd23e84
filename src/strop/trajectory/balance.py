"""Pieces of about equal work, shared out fairly: what micro-batches of one step, and ranks, wait for is the slowest.

pack(batch, 100)             91 ######  98 ######  12 #             the last one is small
pack_balanced(batch, 100)         68 #####   70 #####   63 ####          the same number of pieces
distribute(pieces, 2)             each rank gets as many, as near to the same work as can be
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.trajectory.batch import Batch, Ints
from strop.trajectory.token_tree import MicroBatch, pack


def estimate_work(piece: MicroBatch, width: int) -> float:
    """How much there is to compute, in tokens: each costs its way through the layers' matrices, and a share of that
    for every token it sees. `width` is that of the model's hidden states."""
    seen = float((piece.pos + 1).sum())
    return len(piece.ids) + seen / (6 * width)


def pack_balanced(
    batch: Batch, budget: int, turns: Sequence[int] | Ints | None = None, *, ranks: int = 1
) -> list[MicroBatch]:
    """As `pack`, in as few pieces as the budget allows (a whole number for each rank), none larger than it must be."""
    pieces = pack(batch, budget, turns)
    allowed = -(-len(pieces) // ranks) * ranks
    chosen = range(len(batch.turns)) if turns is None else turns
    low, high = max((len(batch.paths[int(t)]) for t in chosen), default=budget), budget
    while low < high:
        middle = (low + high) // 2
        found = pack(batch, middle, turns)
        if len(found) <= allowed:
            pieces, high = found, middle
        else:
            low = middle + 1
    return pieces


def distribute(pieces: Sequence[MicroBatch], ranks: int, width: int) -> list[list[MicroBatch]]:
    """The pieces of each rank: the largest first, each to the rank that has least, none of which gets one more than
    another by more than one."""
    most = -(-len(pieces) // ranks)
    full = len(pieces) - (most - 1) * ranks if pieces else 0  # ranks that have `most`; the others one less
    out: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    done = [0.0] * ranks
    for piece in sorted(pieces, key=lambda p: -estimate_work(p, width)):
        open_ranks = [r for r in range(ranks) if len(out[r]) < most - 1]
        if sum(len(part) == most for part in out) < full:
            open_ranks += [r for r in range(ranks) if len(out[r]) == most - 1]
        rank = min(open_ranks, key=lambda r: (done[r], r))
        out[rank].append(piece)
        done[rank] += estimate_work(piece, width)
    return out
