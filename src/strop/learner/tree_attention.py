"""Attention over a token tree: token i sees token j exactly when j <= i < end[j].

Queries are taken a block at a time, and for each block only the keys that some query of it sees are gathered. In
depth-first order those are the block itself and the branches still open where it begins, so the work grows with the
tree's depth instead of the square of its size, and no N x N mask ever exists. On GPUs, see flex.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from strop.learner.device import send

NAME = "strop_tree"
BLOCK = 128


class Tree(Protocol):
    """What every layer needs to know about a piece's tree, worked out once. `size`: tokens, padding included."""

    @property
    def size(self) -> int: ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, heads, tokens, width] in and out; keys and values may have fewer heads."""
        ...


@dataclass(frozen=True)
class TreePlan:
    """A `Tree` in plain operations.

    `rows[b]` queries are in block b; they see the next `widths[b]` of `keys`, and `masks[b]` (0 or -inf) is added to
    their scores, [rows, widths].
    """

    rows: list[int]
    widths: list[int]
    keys: Tensor
    masks: list[Tensor]

    @property
    def size(self) -> int:
        return sum(self.rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        key, value = for_all_heads(query, key, value)
        # One gather for all blocks: a gather each would fill and add a gradient of the full size for each in turn.
        blocks = zip(
            query.split(self.rows, 2),
            key.index_select(2, self.keys).split(self.widths, 2),
            value.index_select(2, self.keys).split(self.widths, 2),
            self.masks,
            strict=True,
        )
        return torch.cat([_attend(q, k, v, mask, scaling) for q, k, v, mask in blocks], 2)


def visible(rows: np.ndarray, keys: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The rule, as [rows, keys]."""
    return (keys[None, :] <= rows[:, None]) & (rows[:, None] < end[keys][None, :])


def plan(end: np.ndarray, dtype: torch.dtype, device: torch.device | str, block: int = BLOCK) -> TreePlan:
    """From a piece's `end`, and from nothing else."""
    rows: list[int] = []
    keys: list[np.ndarray] = []
    masks: list[Tensor] = []
    for start in range(0, len(end), block):
        stop = min(start + block, len(end))
        open_keys = np.flatnonzero(end[:stop] > start)
        hidden = torch.from_numpy(~visible(np.arange(start, stop), open_keys, end))
        rows.append(stop - start)
        keys.append(open_keys)
        masks.append(torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device))
    return TreePlan(rows, [len(k) for k in keys], send(np.concatenate(keys), device), masks)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    tree: Tree | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention seam: [batch, heads, tokens, width] in, [batch, tokens, heads, width] out.

    Without `tree` it is plain attention under the mask given, for other callers of the model.
    """
    assert dropout == 0.0
    if tree is not None:
        return tree.attend(query, key, value, scaling).transpose(1, 2), None
    key, value = for_all_heads(query, key, value)
    return _attend(query, key, value, attention_mask, scaling).transpose(1, 2), None


def for_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return key, value


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = torch.matmul(query * scaling, key.transpose(2, 3))
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.matmul(scores.softmax(-1, dtype=wide).to(value.dtype), value)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)
