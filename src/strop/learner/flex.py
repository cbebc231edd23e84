"""A token tree for FlexAttention, on GPUs: one fused kernel that skips the blocks of which no token is seen.

Blocks are told apart by the largest and smallest `end` of their keys alone. Where key block c lies before query block
b = [s, t): some pair is visible when the largest end is past s, and all are when the smallest is t or more.

The kernel is compiled once for every size. Sizes are few: a piece is padded to the next of `sizes`. Padding sees only
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from strop.learner.attention import for_all_heads

BLOCK = 128
SMALLEST = 1024
"""Tokens that sizes are multiples of."""

NARROWEST = 16
"""Numbers per head that the kernel needs; zeros change nothing."""

MOST_SIZES = 256
"""Kernels that torch may compile. Its own limit, past which it refuses, is low."""


@dataclass(frozen=True)
class FlexTree:
    """An attention.py `Tree`. Every layer of a piece has the same."""

    mask: BlockMask

    @property
    def size(self) -> int:
        return self.mask.seq_lengths[0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return _alone(query, key, value, self.mask, scaling)


def _run(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float) -> Tensor:
    width = query.shape[-1]
    if width < NARROWEST:
        query, key, value = (pad(tensor, (0, NARROWEST - width)) for tensor in (query, key, value))
    run = _compiled() if query.is_cuda else _attend
    return run(query, key, value, mask, scaling)[..., :width]


_alone: Any = torch.compiler.disable(_run)
"""Compiled by size, where the blocks around it are for any."""


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float) -> Tensor:
    """Keys and values are repeated for all heads: sharing them, the backward pass takes twice the time."""
    key, value = for_all_heads(query, key, value)
    out: Any = flex_attention(query, key, value, block_mask=mask, scale=scaling)
    return out


def padded_size(tokens: int) -> int:
    """Multiples of 1024, and of a 16th of the power of two above: eight sizes at most between 2^n and 2^(n+1).

    >>> [padded_size(n) for n in (1, 1025, 9000, 17000)]
    [1024, 2048, 9216, 18432]
    """
    step = max(SMALLEST, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def flex_plan(end: np.ndarray, device: torch.device | str, *, size: int | None = None, block: int = BLOCK) -> FlexTree:
    """From a piece's `end`, and from nothing else. `size`: tokens with padding, a multiple of `block`."""
    size = padded_size(len(end)) if size is None else size
    end = np.append(end, np.arange(len(end), size) + 1)
    some, whole = blocks_seen(end, block)
    ends = torch.from_numpy(end.astype(np.int32)).to(device)

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    count, indices = _listed(some & ~whole, device)
    full_count, full_indices = _listed(whole, device)
    mask = BlockMask.from_kv_blocks(
        count, indices, full_count, full_indices, BLOCK_SIZE=block, mask_mod=rule, seq_lengths=(size, size)
    )
    return FlexTree(mask)


def blocks_seen(end: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """[query blocks, key blocks]: of which pairs of blocks some token sees some other, and of which all see all."""
    starts = np.arange(0, len(end), block)
    most, least = np.maximum.reduceat(end, starts), np.minimum.reduceat(end, starts)
    stops = np.minimum(starts + block, len(end))
    before = starts[None, :] < starts[:, None]
    some = (before & (most[None, :] > starts[:, None])) | np.eye(len(starts), dtype=bool)
    whole = before & (least[None, :] >= stops[:, None])
    return some, whole


def _listed(seen: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has [1, 1, blocks], and which: those first [1, 1, blocks, blocks]."""
    indices = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    count = seen.sum(1).astype(np.int32)
    return torch.from_numpy(count)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)


@cache
def _compiled() -> Any:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SIZES)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, MOST_SIZES)
    return torch.compile(_attend, dynamic=False, fullgraph=True)
