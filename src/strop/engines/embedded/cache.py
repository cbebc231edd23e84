"""A static key-value cache with one slot per sequence, in the shape Hugging Face's attention layers ask for.

    slots.aim(rows, columns, width)      where the next forward pass writes, and how wide it looks
    model(..., past_key_values=slots)    every layer calls slots.update(key, value, layer)

Nothing is ever cleared: a slot's old contents lie to the right of what its mask lets it see until they are overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of `rows` sequences of up to `width` tokens, per layer [rows, heads, width, head_dim]."""

    def __init__(self, config: object, *, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        heads: int = config.num_key_value_heads  # pyright: ignore[reportAttributeAccessIssue]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads  # pyright: ignore
        layers: int = config.num_hidden_layers  # pyright: ignore[reportAttributeAccessIssue]
        shape = (layers, rows, heads, width, dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._rows: slice = slice(0, 0)
        self._columns: slice | Tensor = slice(0, 0)
        self._width = width

    def aim(self, rows: slice, columns: slice | Tensor, width: int) -> None:
        """Write the next keys of `rows` at `columns` (a slice of positions for one row, or one position per row) and
        show attention the first `width` columns."""
        self._rows, self._columns, self._width = rows, columns, width

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer, self._rows], self.values[layer, self._rows]
        if isinstance(self._columns, slice):
            keys[:, :, self._columns] = key
            values[:, :, self._columns] = value
        else:
            every = torch.arange(keys.shape[0], device=keys.device)
            keys[every, :, self._columns] = key[:, :, 0]
            values[every, :, self._columns] = value[:, :, 0]
        return keys[:, :, : self._width], values[:, :, : self._width]
