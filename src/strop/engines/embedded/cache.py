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


@dataclass(frozen=True)
class Layout:
    """What one token's keys and values look like, per layer: (heads, width of a key, width of a value)."""

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """The part of every layer that attention is shown."""

    rows: slice
    width: int


class Cache:
    """Per layer [rows, heads, width, head_dim]. It begins `width` wide and grows on demand, to `limit` at most."""

    def __init__(self, layout: Layout, *, rows: int, width: int, limit: int) -> None:
        self.layout = layout
        self.rows = rows
        self.limit = limit
        self.width = min(width, limit)
        self.keys = [self._room(heads, key) for heads, key, _ in layout.layers]
        self.values = [self._room(heads, value) for heads, _, value in layout.layers]
        self._at: tuple[Tensor, Tensor]
        self._index: dict[int, Tensor] = {}  # of the pass, by the number of heads
        self._view = View(slice(None), self.width)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reach(self, width: int) -> None:
        """Make room for `width` columns, one layer at a time, so that no two caches ever exist beside each other."""
        assert width <= self.limit
        if width <= self.width:
            return
        before, self.width = self.width, min(self.limit, max(width, 2 * self.width))
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = new = self._room(old.shape[1], old.shape[3])
                new[:, :, :before] = old

    def aim(self, rows: Tensor, columns: Tensor, view: View) -> None:
        """The next pass's tokens, batch by batch, are written at `rows`, `columns` [tokens]; attention sees `view`."""
        self._at = (rows, columns)
        self._index.clear()
        self._view = view

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Hugging Face's seam: new keys and values [batch, heads, tokens, head_dim] in, all that are seen out."""
        keys, values, view = self.keys[layer], self.values[layer], self._view
        at = self._lines(keys.shape[1])
        keys.view(-1, keys.shape[3]).index_copy_(0, at, key.transpose(1, 2).flatten(0, 2))
        values.view(-1, values.shape[3]).index_copy_(0, at, value.transpose(1, 2).flatten(0, 2))
        return keys[view.rows, :, : view.width], values[view.rows, :, : view.width]

    def _lines(self, heads: int) -> Tensor:
        """Where the pass's tokens lie if a layer is one long list of lines, one per row, head and column."""
        if heads not in self._index:
            rows, columns = self._at
            every = torch.arange(heads, device=rows.device)
            self._index[heads] = ((rows[:, None] * heads + every) * self.width + columns[:, None]).flatten()
        return self._index[heads]

    def copy(self, source: int, target: int, count: int) -> None:
        """Give row `target` the first `count` tokens of row `source`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :count] = tensor[source, :, :count]

    def wipe(self, row: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[row].zero_()

    def get_seq_length(self, *_: object) -> int:
        """Asked for by models that want to know where tokens stand; they are always told."""
        return 0

    def _room(self, heads: int, dim: int) -> Tensor:
        shape = (self.rows, heads, self.width, dim)
        return torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)
