"""Sequence parallelism (Ulysses): one piece of the token tree over several ranks, for trees that are too long for one.

    rank r has   tokens [r * n, (r + 1) * n) with all heads ──exchange──▶ all tokens with its share of the heads
                 attention over the whole tree, whose mask is the same for every head
                 all tokens, some heads ──exchange back──▶ its tokens with all heads

Everything but attention looks at one token at a time, so each rank computes the blocks, and the logits, of its own
tokens. What is read of entries is then given to all ranks of the group: each computes the same loss of the whole piece,
and a gradient flows back to the rank whose token it is. Gradients are summed over ranks as those of other pieces are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from strop.errors import LearnerError
from strop.learner.tree_attention import Tree
from strop.trajectory import MicroBatch
from strop.trajectory.batch import Ints


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share pieces, `size` of them, and which this one is."""

    group: Any
    index: int
    size: int

    def share(self, tokens: int) -> int:
        """How many tokens each rank has of so many, padding included."""
        return -(-tokens // self.size)

    def split(self, tokens: Tensor) -> Tensor:
        """This rank's tokens of all, [1, tokens] in and [1, share] out."""
        share = self.share(tokens.shape[1])
        whole = pad(tokens, (0, share * self.size - tokens.shape[1]))
        return whole[:, self.index * share : (self.index + 1) * share]

    def find_own(self, piece: MicroBatch, tokens: int) -> list[Ints]:
        """For each rank which entries of a piece, which is laid out over so many `tokens`, are read at its tokens."""
        owner = piece.at // self.share(tokens)
        return [np.flatnonzero(owner == rank) for rank in range(self.size)]

    def take_own(self, piece: MicroBatch, tokens: int) -> MicroBatch:
        """The piece with this rank's entries alone, and where they are among its tokens."""
        own = self.find_own(piece, tokens)[self.index]
        return replace(piece, entry=piece.entry[own], at=piece.at[own] - self.index * self.share(tokens))

    def gather_entries(self, column: Tensor, own: list[Ints]) -> Tensor:
        """A column of all entries from each rank's part of it. The gradient goes to the rank that has the entry."""
        most = max(len(each) for each in own)
        found: Tensor = _Gather.apply(pad(column, (0, most - len(column))), self)  # pyright: ignore
        where = np.empty(sum(len(each) for each in own), np.int64)
        for rank, each in enumerate(own):
            where[each] = rank * most + np.arange(len(each))
        return found.index_select(0, torch.from_numpy(where).to(column.device))

    def refuse_heads(self, heads: int) -> None:
        if heads % self.size:
            raise LearnerError(
                f"learner.sequence_parallel={self.size} does not divide the model's {heads} attention heads. Fix: set "
                f"it to {math.gcd(heads, self.size)}"
            )


@dataclass(frozen=True)
class SplitTree:
    """A `Tree` whose tokens are on several ranks."""

    tree: Tree
    group: SequenceGroup

    @property
    def size(self) -> int:
        return self.tree.size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return _attend(self, query, key, value, scaling)

    def run(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        # Fewer keys than ranks are repeated: query heads stay beside the key that they look at.
        groups = query.shape[1] // key.shape[1]
        repeats = min(groups, self.group.size // math.gcd(key.shape[1], self.group.size))
        repeats = repeats if groups % repeats == 0 and key.shape[1] * repeats % self.group.size == 0 else groups
        whole = [
            self._collect(each if each is query or repeats == 1 else each.repeat_interleave(repeats, 1))
            for each in (query, key, value)
        ]
        query, key, value = (each[:, :, : self.size] for each in whole)
        seen = self.tree.attend(query, key, value, scaling)
        return self._give_back(pad(seen, (0, 0, 0, whole[0].shape[2] - self.size)))

    def _collect(self, each: Tensor) -> Tensor:
        """[1, heads, share, width] to [1, heads / ranks, tokens, width]."""
        _, heads, share, width = each.shape
        ranks = self.group.size
        found = _exchange(each.reshape(ranks, heads // ranks, share, width), self.group)
        return found.transpose(0, 1).reshape(1, heads // ranks, ranks * share, width)

    def _give_back(self, each: Tensor) -> Tensor:
        """The other way round."""
        _, heads, tokens, width = each.shape
        ranks = self.group.size
        found = _exchange(each.reshape(heads, ranks, tokens // ranks, width).transpose(0, 1), self.group)
        return found.reshape(1, ranks * heads, tokens // ranks, width)


_attend: Any = torch.compiler.disable(SplitTree.run)
"""What ranks say to each other is not compiled."""


def _exchange(parts: Tensor, group: SequenceGroup) -> Tensor:
    """Part r goes to rank r; returns what came from each rank, [ranks, ...] in and out."""
    found: Tensor = _Exchange.apply(parts, group)  # pyright: ignore
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return _exchange(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        found = part.new_empty(group.size * len(part))
        dist.all_gather_into_tensor(found, part.contiguous(), group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return gradient.view(ctx.group.size, -1)[ctx.group.index], None
