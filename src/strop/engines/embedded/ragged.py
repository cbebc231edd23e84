"""All pieces in one pass on a GPU in half precision: one call attends for sequences of any lengths.

It is told where each sequence's queries begin in the pass and where its keys begin in the cache, as tensors; so a pass
depends on nothing but tensors and its size, and passes of usual sizes are recorded and played again (graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from strop.engines.embedded.cache import Cache, Layout
from strop.engines.embedded.graphs import Graphs
from strop.engines.embedded.norms import FusedNorms
from strop.engines.embedded.passes import PassSlice, end_to_end, forward, refuse_more

NAME = "strop_ragged"
SMALLEST, LARGEST = 64, 4096
"""Tokens of the passes that are recorded, beside those that only decode. In larger ones the GPU has enough to do."""


@dataclass(frozen=True)
class Size:
    """Of a pass. `longest`: the most tokens that one sequence may have in it."""

    tokens: int
    sequences: int
    longest: int


def size_of(pieces: Sequence[PassSlice]) -> Size:
    """The size of a pass of these pieces; of the recording for it, or as it is if it is too large for any.

    A pass that only decodes has a power of two of tokens, one per sequence. Others have a sequence more than pieces,
    which is nobody's and has the tokens that fill them up.
    """
    lengths = [len(piece.ids) for piece in pieces]
    tokens, longest = sum(lengths), max(lengths)
    if longest > 1 and tokens > LARGEST:
        return Size(tokens, len(pieces), longest)
    if longest == 1:
        count = 1 << (len(pieces) - 1).bit_length()
        return Size(count, count, 1)
    sequences = 4
    while sequences <= len(pieces):
        sequences *= 4
    tokens = max(SMALLEST, 1 << (tokens - 1).bit_length())
    return Size(tokens, sequences, tokens)


class RaggedPasses:
    def __init__(self, model: Any, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._norms = FusedNorms(model)
        self._graphs = Graphs(self._forward, model)

    def refresh(self) -> None:
        self._graphs.refresh()

    def run(self, pieces: Sequence[PassSlice]) -> Tensor:
        self._cache.reach(max(piece.stop for piece in pieces))
        size = size_of(pieces)
        recorded = size.tokens <= LARGEST or size.longest == 1
        given = self._lay_out(pieces, size)
        device = self._cache.layout.device
        if recorded:
            logits = self._graphs.run(size, given, beside=(*self._cache.keys, *self._cache.values))
        else:
            logits = self._forward(size, *(tensor.to(device) for tensor in given))
        wanted = [number for number, piece in enumerate(pieces) if piece.last]
        if len(wanted) == len(pieces):
            return logits[: len(wanted)]
        return logits[torch.tensor(wanted, dtype=torch.long).to(device)]

    def _lay_out(self, pieces: Sequence[PassSlice], size: Size) -> tuple[Tensor, Tensor]:
        """Ids, columns and rows [3, tokens]; of each sequence where its queries and its keys begin, how many keys it
        has, and its last token [4, sequences + 1]. What fills them up lies in the cache's spare row."""
        spare, width = self._cache.rows, self._cache.width
        given = end_to_end(pieces)
        count, tokens = len(pieces), given.shape[1]
        inputs = np.zeros((3, size.tokens), np.int64)
        inputs[:, :tokens] = given
        inputs[2, tokens:] = spare
        of_sequences = np.zeros((4, size.sequences + 1), np.int32)
        begin, keys, used, last = of_sequences
        if size.longest == 1:
            begin[:] = np.arange(size.sequences + 1)
        else:
            begin[1 : count + 1] = np.cumsum([len(piece.ids) for piece in pieces])
            begin[count + 1 :] = size.tokens
        keys[:-1], used[:-1] = spare * width, 1
        keys[:count] = np.array([piece.row for piece in pieces]) * width
        used[:count] = [piece.stop for piece in pieces]
        last[:-1] = np.maximum(begin[1:] - 1, 0)
        return torch.from_numpy(inputs), torch.from_numpy(of_sequences)

    def _forward(self, size: Size, inputs: Tensor, starts: Tensor) -> Tensor:
        """Logits of every sequence's last token. Nothing here waits for the device."""
        plan = RaggedPlan(starts[0], starts[1], starts[2, :-1], size.longest, self._cache.width)
        with self._norms.using():
            return forward(self._model, self._cache, NAME, inputs, starts[3, :-1].long(), ragged=plan)


@dataclass(frozen=True)
class RaggedPlan:
    """Where sequences' queries begin in the pass and their keys in the cache, and how many keys they have; int32."""

    queries: Tensor  # [sequences + 1]
    keys: Tensor  # [sequences + 1]
    used: Tensor  # [sequences]
    longest_query: int
    longest_key: int


def fits(layout: Layout) -> bool:
    """Whether the call knows these shapes."""
    half = layout.dtype in (torch.bfloat16, torch.float16)
    usual = all(key == value and key % 8 == 0 and key <= 256 for _, key, value in layout.layers)
    if layout.device.type != "cuda" or torch.version.hip is not None:
        return False
    return half and usual and torch.cuda.get_device_capability(layout.device)[0] >= 8


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    ragged: RaggedPlan | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention seam: query [1, heads, tokens, width], all rows' keys and values; [1, tokens, heads,
    width] out."""
    refuse_more(module, more)
    assert ragged is not None
    out = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        ragged.queries,
        ragged.keys,
        ragged.longest_query,
        ragged.longest_key,
        0.0,
        True,  # causal: a sequence's last query sees its last key
        False,
        scale=scaling,
        seqused_k=ragged.used,
    )[0]
    return out[None], None


AttentionInterface.register(NAME, attention)
