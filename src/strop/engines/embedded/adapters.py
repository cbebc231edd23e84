"""LoRA adapters side by side on one model: in every pass each sequence goes through its own policy's matrices.

    sequences of a pass   a a a b b - a         of the policies a and b, and one of the plain model
    x @ A                 [tokens, ranks of a | ranks of b]   every policy's first matrix at once
    * mask                0 where it is not the token's own policy, the policy's scaling where it is
    @ B                   [tokens, out]         added to what the layer itself gives

The model's own weights are the learner's. The matrices are copies, renewed one policy at a time, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.functional import linear


class AdapterMatrices(Struct, frozen=True):
    """A policy's adapter as it stands: by the name of a layer A [rank, in] and B [out, rank], and what their product is
    multiplied by."""

    layers: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    scaling: float


class Adapters:
    """Puts layers that know of adapters into `model`, in the place of its own. `ranks` says how large each policy's
    adapter is, 0 of one that is the plain model; `rows` is how many sequences there may be."""

    def __init__(self, model: Any, ranks: Mapping[str, int], layers: set[str], *, rows: int) -> None:
        self._numbers = {policy: number for number, policy in enumerate(ranks)}
        self._starts: dict[str, int] = {}
        total = 0
        for policy, rank in ranks.items():
            self._starts[policy] = total
            total += rank
        self._ranks, device = dict(ranks), model.device
        # By a policy's number, and after the last one that of nobody: what its tokens take of the matrices.
        self._owns = torch.zeros(len(ranks) + 1, total, dtype=model.dtype, device=device)
        self._row_owner = torch.full((rows,), len(ranks), dtype=torch.long, device=device)
        self._mask: Tensor | None = None
        self._layers = {name: AdapterLinear(model.get_submodule(name), total, self) for name in sorted(layers)}
        for name, layer in self._layers.items():
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)

    def number(self, policy: str) -> int:
        """Policies are numbered in their order."""
        return self._numbers[policy]

    @torch.no_grad()
    def load(self, policy: str, matrices: AdapterMatrices) -> None:
        """Take a policy's matrices as they are now."""
        rank, start = self._ranks[policy], self._starts[policy]
        ours = slice(start, start + rank)
        self._owns[self._numbers[policy], ours] = matrices.scaling
        for name, (a, b) in matrices.layers.items():
            self._layers[name].a[ours].copy_(a)
            self._layers[name].b[:, ours].copy_(b)

    def assign(self, row: int, policy: str) -> None:
        """The sequence in this row is a policy's."""
        self._row_owner[row] = self._numbers[policy]

    def aim(self, rows: Tensor) -> None:
        """The next pass's tokens are of the sequences in `rows` [tokens]."""
        self._mask = self._owns[self._row_owner[rows]]

    def apply(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
        """What the adapters add to a layer's output; nothing before a pass was aimed."""
        if self._mask is None:
            return None
        return linear(linear(x, a) * self._mask.view(*x.shape[:-1], -1), b)


class AdapterLinear(nn.Module):
    """A linear layer with every policy's matrices beside it, one policy's after the other's."""

    a: Tensor
    b: Tensor

    def __init__(self, base: nn.Module, total: int, adapters: Adapters) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base_layer = base
        self._adapters = adapters
        like = base.weight
        self.register_buffer("a", torch.zeros(total, base.in_features, dtype=like.dtype, device=like.device))
        self.register_buffer("b", torch.zeros(base.out_features, total, dtype=like.dtype, device=like.device))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        added = self._adapters.apply(x, self.a, self.b)
        return out if added is None else out + added
