"""The token tree: turns laid out so that every shared prefix appears once.

Two turns with the paths [1 5 2 | 7 8] and [1 5 2 | 7 9 3] (| is where the response begins), in one micro-batch:

    index  0  1  2  3  4  5  6
    ids    1  5  2  7  8  9  3
    pos    0  1  2  3  4  4  5      depth in the tree: the position the model is told
    end    7  7  7  7  5  7  7      index past the token's subtree
    at     2  3  /  2  3  5         where the logits that predict 7 8 / 7 9 3 are read

Token i sees token j exactly when j <= i < end[j]: 9 does not see 8, everything sees 1 5 2 7. That one rule is the whole
attention mask. Both turns sampled the 7 in the same context: they share its computation and keep an entry each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from strop.trajectory.batch import Batch, Bools, Ints


@dataclass(frozen=True)
class MicroBatch:
    """A forest of token trees that fits the token budget. `entry[k]` is a row of Entries, `at[k]` the index that
    predicts it."""

    ids: Ints
    pos: Ints
    end: Ints
    entry: Ints
    at: Ints


def pack(batch: Batch, budget: int, turns: Sequence[int] | Ints | None = None) -> list[MicroBatch]:
    """Lay the given turns (default: all) out in micro-batches of at most `budget` tokens; each entry is in exactly one.

    Paths are taken in lexicographic order, which is depth-first order of their tree and does not depend on who came
    first. A micro-batch that begins within a tree repeats the prefix it needs: a tree is cut at a branch, where that
    repeats least.
    """
    chosen = range(len(batch.turns)) if turns is None else [int(t) for t in turns]
    # Big-endian bytes compare like the ids they hold, and a prefix comes right before what extends it.
    sampled = np.diff(batch.starts)
    keyed = sorted((batch.paths[t].astype(">u8").tobytes(), len(batch.paths[t]) - int(sampled[t]), t) for t in chosen)
    leaves: list[list[int]] = [[]]  # the turns of each path that no other runs through, its own last
    for k, (key, _, t) in enumerate(keyed):
        leaves[-1].append(t)
        if k + 1 < len(keyed) and not keyed[k + 1][0].startswith(key):
            leaves.append([])
    if not keyed:
        return []
    paths = [batch.paths[turns[-1]] for turns in leaves]
    for turns, path in zip(leaves, paths, strict=True):
        assert len(path) <= budget, f"turn {batch.turns[turns[-1]].id} has {len(path)} tokens, the budget is {budget}"
    length = np.array([len(path) for path in paths], np.int64)
    shared = np.array([0, *(count_shared(one, other) for one, other in pairwise(paths))], np.int64)
    pieces: list[MicroBatch] = []
    for first, last in pairwise([*find_cuts(length, shared, budget), len(paths)]):
        piece = _Builder()
        for k in range(first, last):
            piece.add(paths[k], int(shared[k]) if k > first else 0)
            for turn in leaves[k]:
                piece.attach(batch, turn)
        pieces.append(piece.close())
    return pieces


PIECE_COST = 256
"""What a micro-batch costs beside its tokens (kernels launched, gradients added up), in tokens."""


def find_cuts(length: Ints, shared: Ints, budget: int) -> list[int]:
    """The paths that micro-batches begin with: those for which fewest tokens are laid out, and among equals those that
    make micro-batches of equal size. Path k has `length[k]` tokens, of which `shared[k]` are those of the one before.

    Three trees of 8,000 tokens, two paths each, of which 4,000 are shared; cutting within one would repeat those:

    >>> find_cuts(1000 * np.array([6, 6, 6, 6, 6, 6]), 1000 * np.array([0, 4, 0, 4, 0, 4]), 14_000)
    [0, 2, 4]
    """
    fresh = np.append(0, np.cumsum(length - shared))
    if fresh[-1] <= budget:
        return [0]
    count = len(length)
    # cost[k]: of the cheapest layout of the first k paths. What makes pieces equal counts for less than a token.
    cost, begin = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    low = 0
    for end in range(1, count + 1):
        while length[low] + fresh[end] - fresh[low + 1] > budget:
            low += 1
        size = length[low:end] + fresh[end] - fresh[low + 1 : end + 1]
        total = cost[low:end] + size + PIECE_COST + (size / budget) ** 2 / (count + 1)
        best = len(total) - 1 - int(np.argmin(total[::-1]))  # of equal ones that whose first pieces are the fullest
        cost[end], begin[end] = total[best], low + best
    cuts: list[int] = []
    at = count
    while at:
        at = int(begin[at])
        cuts.insert(0, at)
    return cuts


def count_shared(one: Ints, other: Ints) -> int:
    """How many ids two paths begin with in common."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


class _Builder:
    """A micro-batch being filled. `where` is the index of each token of the last path that was added, its branch."""

    def __init__(self) -> None:
        self.size = 0
        self.where = np.empty(0, np.int64)
        self.ids: list[Ints] = []
        self.pos: list[Ints] = []
        self.ends: list[tuple[Ints, int]] = []
        self.entry: list[Ints] = []
        self.at: list[Ints] = []

    def add(self, path: Ints, known: int) -> None:
        """`path`, which begins with `known` ids of the branch."""
        new = len(path) - known
        self.ends.append((self.where[known:], self.size))  # what the new path does not run through is complete
        self.where = np.concatenate([self.where[:known], np.arange(self.size, self.size + new)])
        self.ids.append(path[known:])
        self.pos.append(np.arange(known, len(path), dtype=np.int64))
        self.size += new

    def attach(self, batch: Batch, turn: int) -> None:
        rows = batch.rows(turn)
        first = len(batch.paths[turn]) - len(rows) - 1  # the last token of the prompt predicts the first sampled one
        self.entry.append(rows)
        self.at.append(self.where[first : first + len(rows)])

    def close(self) -> MicroBatch:
        end = np.empty(self.size, np.int64)
        for where, index in [*self.ends, (self.where, self.size)]:
            end[where] = index
        pos, ids = np.concatenate(self.pos), np.concatenate(self.ids)
        return MicroBatch(ids=ids, pos=pos, end=end, entry=np.concatenate(self.entry), at=np.concatenate(self.at))


def check(pieces: Sequence[MicroBatch], batch: Batch, turns: Sequence[int] | Ints | None = None) -> None:
    """Assert that what each entry's token will see is exactly its turn's ids, and that each entry is laid out once.

    Works from `ids`, `pos`, `end` and `at` alone, so that it shares nothing with the way `pack` got there.
    """
    chosen = np.arange(len(batch.turns)) if turns is None else np.array(turns, np.int64)
    wanted = np.isin(batch.entries.turn, chosen)
    laid = np.concatenate([p.entry for p in pieces]) if pieces else np.empty(0, np.int64)
    assert np.array_equal(np.sort(laid), np.flatnonzero(wanted)), "an entry is not laid out exactly once"
    for piece in pieces:
        _check_piece(piece, batch)


def _check_piece(piece: MicroBatch, batch: Batch) -> None:
    size = len(piece.ids)
    assert len(piece.pos) == len(piece.end) == size, "ragged micro-batch"
    assert (piece.end > np.arange(size)).all(), "a token that does not see itself"
    assert piece.end.max() <= size, "a token seen past the micro-batch"
    opened = np.ones(size + 1, np.int64)
    opened[size] = 0
    seen = np.cumsum(opened - np.bincount(piece.end, minlength=size + 1))[:size]
    assert np.array_equal(seen, piece.pos + 1), "a token sees more or fewer tokens than its depth"
    if not len(piece.entry):
        return
    turn_of = batch.entries.turn[piece.entry]
    last = np.flatnonzero(np.diff(turn_of, append=-1))  # an entry block per turn; its last token is the deepest
    first = np.append(0, last[:-1] + 1)
    order = np.argsort(piece.at[last], kind="stable")
    first, last = first[order], last[order]
    _check_turns(piece, batch, turn_of[last], piece.at[last], first, last + 1 - first)


def _check_turns(piece: MicroBatch, batch: Batch, turns: Ints, deepest: Ints, first: Ints, count: Ints) -> None:
    """Of each turn, in the order of their last tokens: its entries are `count` from `first` on, and `deepest` is where
    the last of them is read. All turns are compared at once, each as a part of long arrays."""

    def refuse(wrong: Bools, owner: Ints | None, why: str) -> None:
        if wrong.any():
            turn = int(wrong.argmax()) if owner is None else int(owner[wrong.argmax()])
            raise AssertionError(f"turn {batch.turns[int(turns[turn])].id} {why}")

    number = np.arange(len(turns))
    size = piece.pos[deepest] + 1
    stop, ways = np.cumsum(size), np.concatenate(_walk(piece, deepest.tolist(), size.tolist()))
    refuse(ways[stop - 1] != deepest, None, "ends elsewhere")
    paths: list[Ints] = [batch.paths[int(turn)] for turn in turns]
    length, ids = np.array([len(path) for path in paths], np.int64), np.concatenate(paths)
    refuse(length - 1 != size, None, "reads back as other ids")
    owner, path_stop = np.repeat(number, size), np.cumsum(length)
    refuse(piece.ids[ways] != np.delete(ids, path_stop - 1), owner, "reads back as other ids")
    refuse(piece.end[ways] <= deepest[owner], owner, "does not see its whole context")
    refuse(count > size, None, "is read at the wrong place")
    refuse(count != batch.starts[turns + 1] - batch.starts[turns], None, "is cut in two")
    owner = np.repeat(number, count)
    place = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]  # of an entry in its turn
    back = place - count[owner]  # the same, seen from the end
    at, entry = piece.at[first[owner] + place], piece.entry[first[owner] + place]
    refuse(at != ways[stop[owner] + back], owner, "is read at the wrong place")
    refuse(entry != batch.starts[turns][owner] + place, owner, "is cut in two")
    refuse(batch.entries.target[entry] != ids[path_stop[owner] + back], owner, "has other targets")


def _walk(piece: MicroBatch, tokens: list[int], sizes: list[int]) -> list[Ints]:
    """The way from the root to each of these tokens, which come in their order; of as many tokens as are given."""
    # Depth-first order: within a run each token is the child of the one before; a run hangs from an earlier branch.
    runs = np.flatnonzero(np.diff(piece.pos, prepend=-2) != 1)
    depths = piece.pos[runs].tolist()
    bounds = [*runs.tolist(), len(piece.ids)]
    every = np.arange(len(piece.ids))
    branch = np.zeros(int(piece.pos.max()) + 1, np.int64)
    ways: list[Ints] = []
    run = 0
    for token, size in zip(tokens, sizes, strict=True):
        while run < len(runs) and bounds[run] <= token:
            start, stop = bounds[run], bounds[run + 1]
            branch[depths[run] : depths[run] + stop - start] = every[start:stop]
            run += 1
        ways.append(branch[:size].copy())
    return ways
