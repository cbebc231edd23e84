"""All pieces in one pass, end to end, without padding: tokens being decoded and chunks of prompts side by side.

The model sees one row of tokens, each with its position; only attention looks at sequences apart. Decoded tokens are
attended to in runs of neighbouring rows, where the query heads that share a key head stand as queries beside each
other, so that no key is ever repeated; chunks of prompts are attended to one by one. On a GPU, see ragged.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from strop.engines.embedded.cache import Cache
from strop.engines.embedded.linears import Linears
from strop.engines.embedded.passes import PassSlice, end_to_end, forward, refuse_more

NAME = "strop_packed"
SLACK = 4096
"""Columns of padding that are cheaper than another call."""


@dataclass(frozen=True)
class DecodeRun:
    """Tokens [start, stop) of the pass, being decoded in `rows`; each sees what `mask` leaves of `width` columns."""

    start: int
    stop: int
    rows: slice
    width: int
    mask: Tensor | None


@dataclass(frozen=True)
class Prefill:
    """Tokens [start, stop) of the pass, the newest of the `width` tokens of `row`."""

    start: int
    stop: int
    row: int
    width: int
    mask: Tensor | None


@dataclass(frozen=True)
class PackedPlan:
    runs: list[DecodeRun]
    prefills: list[Prefill]


class PackedPasses:
    """Pieces that decode must come first, in the order of their rows."""

    def __init__(self, model: Any, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._columns = torch.arange(cache.limit, device=cache.layout.device)
        self._linears = Linears(model)

    def refresh(self) -> None:
        self._linears.refresh()

    def run(self, pieces: Sequence[PassSlice]) -> Tensor:
        self._cache.reach(max(piece.stop for piece in pieces))
        device = self._cache.layout.device
        inputs = torch.from_numpy(end_to_end(pieces)).to(device)
        ends = np.cumsum([len(piece.ids) for piece in pieces]) - 1
        wanted = torch.from_numpy(ends[[piece.last for piece in pieces]]).to(device)
        with self._linears.using():
            return forward(self._model, self._cache, NAME, inputs, wanted, packed=self._plan(pieces, inputs[1]))

    def _plan(self, pieces: Sequence[PassSlice], places: Tensor) -> PackedPlan:
        plan = PackedPlan([], [])
        decoding = [piece for piece in pieces if piece.sampled]
        start = 0
        for together in _runs(decoding):
            stop, width = start + len(together), max(piece.stop for piece in together)
            mask = None
            if any(piece.stop != width for piece in together):
                mask = self._mask(self._columns[:width] <= places[start:stop, None])[:, None, None]
            plan.runs.append(DecodeRun(start, stop, slice(together[0].row, together[-1].row + 1), width, mask))
            start = stop
        for piece in pieces[len(decoding) :]:
            assert not piece.sampled
            stop, mask = start + len(piece.ids), None
            if piece.start > 0 and len(piece.ids) > 1:
                mask = self._mask(self._columns[: piece.stop] <= places[start:stop, None])
            plan.prefills.append(Prefill(start, stop, piece.row, piece.stop, mask))
            start = stop
        return plan

    def _mask(self, seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self._cache.layout.dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)


def _runs(decoding: Sequence[PassSlice]) -> list[list[PassSlice]]:
    """Neighbouring rows of not too different lengths."""
    runs: list[list[PassSlice]] = []
    total = widest = 0
    for piece in decoding:
        widest, total = max(widest, piece.stop), total + piece.stop
        if runs and runs[-1][-1].row + 1 == piece.row and (len(runs[-1]) + 1) * widest <= 2 * total + SLACK:
            runs[-1].append(piece)
        else:
            assert not runs or runs[-1][-1].row < piece.row
            runs.append([piece])
            widest = total = piece.stop
    return runs


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedPlan | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention seam: query [1, heads, tokens, width], all rows' keys and values; [1, tokens, heads,
    width] out."""
    refuse_more(module, more)
    assert packed is not None
    groups = query.shape[1] // key.shape[1]
    out: list[Tensor] = []
    for run in packed.runs:
        mine = query[0, :, run.start : run.stop].unflatten(0, (-1, groups)).permute(2, 0, 1, 3)
        fast = mine.dtype == torch.float32 and mine.device.type == "cpu"
        attend = attend_on_cpu if fast else scaled_dot_product_attention
        seen = attend(mine, key[run.rows, :, : run.width], value[run.rows, :, : run.width], run.mask, scale=scaling)
        out.append(seen.flatten(1, 2))
    for part in packed.prefills:
        seen = scaled_dot_product_attention(
            query[0, :, part.start : part.stop].unflatten(0, (-1, groups)),
            key[part.row, :, None, : part.width].expand(-1, groups, -1, -1),  # without a copy
            value[part.row, :, None, : part.width].expand(-1, groups, -1, -1),
            attn_mask=part.mask,
            is_causal=part.mask is None and part.stop - part.start == part.width,
            scale=scaling,
        )
        out.append(seen.flatten(0, 1).transpose(0, 1))
    return torch.cat(out)[None], None


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """scaled_dot_product_attention for a few queries a head, in fp32 on a CPU, in two thirds of its time. [rows, heads,
    queries, width]; a head's keys and values lie in memory one after the other, all heads at one distance.

    The larger matrix comes first, which suits the routine, and a weighted sum of values is that of an embedding bag."""
    rows, heads, queries, size = query.shape
    width, distance = key.shape[2], value.stride(1) // value.stride(2)
    assert value.stride() == (heads * value.stride(1), distance * value.shape[3], value.shape[3], 1)
    scaled = (query * (size**-0.5 if scale is None else scale)).flatten(0, 1)
    scores = torch.bmm(key.flatten(0, 1), scaled.transpose(1, 2)).transpose(1, 2).unflatten(0, (rows, heads))
    if mask is not None:  # into the order in which softmax reads
        scores = torch.add(scores, mask, out=scores.new_empty(scores.shape))
    weights = scores.softmax(-1)
    table = value.as_strided((rows * heads * distance - distance + width, value.shape[3]), (value.stride(2), 1))
    places = _places(rows * heads, queries, width, distance)
    seen = embedding_bag(places, table, mode="sum", per_sample_weights=weights.flatten(0, 2))
    return seen.unflatten(0, (rows, heads, queries))


@lru_cache(maxsize=8)  # the layers of a pass ask for the same
def _places(heads: int, queries: int, width: int, distance: int) -> Tensor:
    """Which lines of the table each query sees. [heads x queries, width]"""
    lines = torch.arange(heads)[:, None, None] * distance + torch.arange(width)
    return lines.expand(-1, queries, -1).flatten(0, 1)


AttentionInterface.register(NAME, attention)
