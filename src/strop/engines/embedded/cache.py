"""Keys and values of all sequences, one slot (row) each, in the shape Hugging Face's attention layers ask for.

    cache.aim(rows, columns, view)      where the next forward pass writes, and what attention is shown
    model(..., past_key_values=cache)   every layer calls cache.update(key, value, layer)

A row's old contents lie to the right of what its mask lets it see until they are overwritten. They are multiplied by 0
there, so they must be finite: a row that may hold NaN is wiped before anybody else gets it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engines.embedded.adapters import Adapters


@dataclass(frozen=True)
class Layout:
    """What one token's keys and values look like, per layer: (heads, width of a key, width of a value)."""

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def spare(self) -> int:
        """Rows beside those of sequences, for tokens that only fill up a pass; see ragged.py."""
        return 1 if self.device.type == "cuda" else 0

    @property
    def bytes_per_token(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheView:
    """The part of every layer that attention is shown."""

    rows: slice
    width: int


class Cache:
    """Per layer [rows and spare ones, width, heads, head_dim]. It begins `width` wide and grows on demand, to `limit`
    at most. Where sequences have `adapters` of their own, those are told which tokens are whose."""

    def __init__(self, layout: Layout, *, rows: int, width: int, limit: int) -> None:
        self.layout = layout
        self.rows = rows
        self.limit = limit
        self.width = min(width, limit)
        self.keys = [self._room(heads, key) for heads, key, _ in layout.layers]
        self.values = [self._room(heads, value) for heads, _, value in layout.layers]
        self.adapters: Adapters | None = None
        self._lines: Tensor
        self._view = CacheView(slice(None), self.width)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reach(self, width: int) -> None:
        """Grow to `width` columns, one layer at a time, so that no two caches ever exist beside each other."""
        assert width <= self.limit
        if width <= self.width:
            return
        before, self.width = self.width, min(self.limit, max(width, 2 * self.width))
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = new = self._room(old.shape[2], old.shape[3])
                new[:, :before] = old

    def aim(self, rows: Tensor, columns: Tensor, view: CacheView) -> None:
        """The next pass's tokens, batch by batch, are written at `rows`, `columns` [tokens]; attention sees `view`."""
        self._lines = rows * self.width + columns
        self._view = view
        if self.adapters is not None:
            self.adapters.aim(rows)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Hugging Face's seam: new keys and values [batch, heads, tokens, head_dim] in, all that are seen out."""
        keys, values, view = self.keys[layer], self.values[layer], self._view
        keys.flatten(0, 1).index_copy_(0, self._lines, key.transpose(1, 2).flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, self._lines, value.transpose(1, 2).flatten(0, 1))
        return keys[view.rows, : view.width].transpose(1, 2), values[view.rows, : view.width].transpose(1, 2)

    def copy(self, source: int, target: int, count: int) -> None:
        """Give row `target` the first `count` tokens of row `source`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :count] = tensor[source, :count]

    def wipe(self, row: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[row].zero_()

    def get_seq_length(self, *_: object) -> int:
        """Asked for by models that want to know where tokens stand; they are always told."""
        return 0

    def _room(self, heads: int, dim: int) -> Tensor:
        shape = (self.rows + self.layout.spare, self.width, heads, dim)
        return torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)
