"""A token tree for FlexAttention, on GPUs: one fused kernel that skips the blocks of which no token is seen.

Blocks are told apart by the largest and smallest `end` of their keys alone. Where key block c lies before query block
b = [s, t): some pair is visible when the largest end is past s, and all are when the smallest is t or more.

The kernel is compiled once for every size, which takes seconds. So sizes are few, and only attention sees them:
queries, keys and values are padded on their way in, which costs little, since padding sees only itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from strop.learner.device import send
from strop.learner.tree_attention import for_all_heads

BLOCK = 128
SMALLEST = 2**13
COARSE = 2**14
"""Sizes are powers of two from the smallest to here: below, what is around attention takes longer than padding."""

NARROWEST = 16
"""Numbers per head that the kernel needs; zeros change nothing."""

MOST_SIZES = 256
"""Kernels that torch may compile. Its own limit, past which it refuses, is low."""


@dataclass(frozen=True)
class FlexTree:
    """An attention.py `Tree`. Every layer of a piece has the same."""

    mask: BlockMask
    size: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return _alone(query, key, value, self.mask, scaling)


def _run(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float) -> Tensor:
    tokens, width = query.shape[2:]
    more = 0, max(0, NARROWEST - width), 0, mask.seq_lengths[0] - tokens
    if any(more):
        query, key, value = (pad(tensor, more) for tensor in (query, key, value))
    run = _compiled() if query.is_cuda else _attend
    return run(query, key, value, mask, scaling)[:, :, :tokens, :width]


_alone: Any = torch.compiler.disable(_run)
"""Compiled by size, where the blocks around it are for any."""


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float) -> Tensor:
    """Keys and values are repeated for all heads: sharing them, the backward pass takes twice the time."""
    key, value = for_all_heads(query, key, value)
    out: Any = flex_attention(query, key, value, block_mask=mask, scale=scaling)
    return out


def padded_size(tokens: int) -> int:
    """What the model around attention is run on.

    >>> padded_size(9000)
    9088
    """
    return -(-tokens // BLOCK) * BLOCK


def kernel_size(tokens: int) -> int:
    """Powers of two, and later multiples of a 16th of the power of two above: eight between 2^n and 2^(n+1).

    >>> [kernel_size(n) for n in (1, 1025, 9000, 17000)]
    [8192, 8192, 16384, 18432]
    """
    above = max(SMALLEST, 1 << (tokens - 1).bit_length())
    step = above if above <= COARSE else above // 16
    return -(-tokens // step) * step


def build_flex_plan(
    end: np.ndarray, device: torch.device | str, *, size: int | None = None, block: int = BLOCK
) -> FlexTree:
    """From a piece's `end`, and from nothing else. `size`: the kernel's, a multiple of `block`."""
    tokens, size = padded_size(len(end)), size or kernel_size(len(end))
    end = np.append(end, np.arange(len(end), size) + 1)
    given = [send(array, device) for array in (end.astype(np.int32), *list_blocks(end, block))]
    return make_flex_tree(given, min(tokens, size), size, block)


def list_blocks(end: np.ndarray, block: int) -> list[np.ndarray]:
    """What attention is told about blocks, of which `end` has a whole number: by query those that are seen in part and
    wholly, then by key; of each how many [1, 1, blocks] and which, those first [1, 1, blocks, blocks]."""
    some, whole = find_blocks_seen(end, block)
    partly = some & ~whole
    return [array for seen in (partly, whole, partly.T, whole.T) for array in _listed(seen)]


def make_flex_tree(given: Sequence[Tensor], tokens: int, size: int, block: int) -> FlexTree:
    """From `end` as int32, padding included, and what `list_blocks` says of it."""
    ends, *blocks = given

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    # Made directly: from_kv_blocks would find the query blocks of each key block on the GPU, by sorting.
    mask = BlockMask((size, size), *blocks, BLOCK_SIZE=(block, block), mask_mod=rule)
    return FlexTree(mask, tokens)


def find_blocks_seen(end: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """[query blocks, key blocks]: of which pairs of blocks some token sees some other, and of which all see all."""
    starts = np.arange(0, len(end), block)
    most, least = np.maximum.reduceat(end, starts), np.minimum.reduceat(end, starts)
    stops = np.minimum(starts + block, len(end))
    before = starts[None, :] < starts[:, None]
    some = (before & (most[None, :] > starts[:, None])) | np.eye(len(starts), dtype=bool)
    whole = before & (least[None, :] >= stops[:, None])
    return some, whole


def _listed(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    indices = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    return seen.sum(1).astype(np.int32)[None, None], indices[None, None]


@cache
def _compiled() -> Any:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SIZES)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, MOST_SIZES)
    return torch.compile(_attend, dynamic=False, fullgraph=True)
