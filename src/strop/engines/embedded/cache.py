"""Keys and values of all sequences, one slot (row) each, in the shape Hugging Face's attention layers ask for.

    cache.aim(rows, columns, view)      where the next forward pass writes, and what attention is shown
    model(..., past_key_values=cache)   every layer calls cache.update(key, value, layer)

A row's old contents lie to the right of what its mask lets it see until they are overwritten. They are multiplied by 0
there, so they must be finite: a row that may hold NaN is wiped before anybody else gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class RowCopy:
    """The first `count` tokens of row `source` belong into row `target` as well."""

    source: int
    target: int
    count: int


class Cache:
    """Per layer [rows and spare ones, width, heads, head_dim]. It begins `width` wide and grows on demand, to `limit`
    at most. `heads_first`: a head's columns are neighbours in memory, instead of a column's heads. Where sequences have
    `adapters` of their own, those are told which tokens are whose."""

    def __init__(self, layout: Layout, *, rows: int, width: int, limit: int, heads_first: bool = False) -> None:
        self.layout = layout
        self.heads_first = heads_first
        self.rows = rows
        self.limit = limit
        self.width = min(width, limit)
        self.keys = [self._room(heads, key) for heads, key, _ in layout.layers]
        self.values = [self._room(heads, value) for heads, _, value in layout.layers]
        self.adapters: Adapters | None = None
        self._rows: Tensor
        self._columns: Tensor
        self._lines: dict[int, Tensor] = {}  # by the number of heads, where they matter
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
        self._rows, self._columns = rows, columns
        self._lines.clear()
        self._view = view
        if self.adapters is not None:
            self.adapters.aim(rows)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Hugging Face's seam: new keys and values [batch, heads, tokens, head_dim] in, all that are seen out."""
        keys, values, view = self.keys[layer], self.values[layer], self._view
        self._write(keys, key)
        self._write(values, value)
        return keys[view.rows, : view.width].transpose(1, 2), values[view.rows, : view.width].transpose(1, 2)

    def _write(self, into: Tensor, new: Tensor) -> None:
        """New keys or values [batch, heads, tokens, head_dim] to where the pass is aimed."""
        if not self.heads_first:
            lines = self._find_lines(1)
            into.flatten(0, 1).index_copy_(0, lines, new.transpose(1, 2).flatten(0, 1))
        else:
            lines = self._find_lines(new.shape[1])
            into.transpose(1, 2).flatten(0, 2).index_copy_(0, lines, new.transpose(1, 2).flatten(0, 2))

    def _find_lines(self, heads: int) -> Tensor:
        """Where the pass's tokens lie in memory, each with so many heads that lie apart. [tokens x heads]"""
        if heads not in self._lines:
            head = torch.arange(heads, device=self._rows.device)
            self._lines[heads] = ((self._rows[:, None] * heads + head) * self.width + self._columns[:, None]).flatten()
        return self._lines[heads]

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Give rows the beginnings of others, many at once: a copy of its own for each row and layer takes longer to
        ask for than to make. No row is both a source and a target. More than `count` tokens may be copied: what lies
        after those that a row has is overwritten before it is seen."""
        by_length: dict[int, list[RowCopy]] = {}
        for copy in copies:
            by_length.setdefault((copy.count - 1).bit_length(), []).append(copy)
        for some in by_length.values():
            count = max(copy.count for copy in some)
            sources, targets = torch.tensor([[one.source, one.target] for one in some]).to(self.layout.device).T
            for tensor in (*self.keys, *self.values):
                tensor[targets, :count] = tensor[sources, :count]

    def wipe(self, row: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[row].zero_()

    def get_seq_length(self, *_: object) -> int:
        """Asked for by models that want to know where tokens stand; they are always told."""
        return 0

    def _room(self, heads: int, dim: int) -> Tensor:
        rows = self.rows + self.layout.spare
        shape = (rows, heads, self.width, dim) if self.heads_first else (rows, self.width, heads, dim)
        room = torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)
        return room.transpose(1, 2) if self.heads_first else room
