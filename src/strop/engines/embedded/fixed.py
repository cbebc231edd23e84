"""Deterministic passes: a sequence's bits depend on nothing but its tokens and the weights.

Chunks are run alone and padded to one size, decoding always runs all rows at one width, and attention is the model's
own under an explicit mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.engines.embedded.cache import Cache, CacheView
from strop.engines.embedded.passes import PassSlice


class FixedPasses:
    """The cache must be as wide as it gets, a whole number of chunks; pieces other than sampled ones begin at one."""

    def __init__(self, model: Any, cache: Cache, *, chunk: int) -> None:
        assert cache.width == cache.limit
        assert cache.width % chunk == 0
        self._model = model
        self._cache = cache
        self._chunk = chunk
        self._device = cache.layout.device
        self._columns = torch.arange(cache.width, device=self._device)
        self._lowest = torch.finfo(cache.layout.dtype).min
        self._last = int(getattr(model.config, "max_position_embeddings", None) or cache.width) - 1

    def run(self, pieces: Sequence[PassSlice]) -> Tensor:
        decoding = [piece for piece in pieces if piece.sampled]
        logits = [self._decode(decoding)] if decoding else []
        for piece in pieces[len(decoding) :]:
            found = self._prefill(piece)
            if piece.last:
                logits.append(found)
        return torch.cat(logits) if logits else torch.empty(0, self._model.config.vocab_size)

    def refresh(self) -> None:
        """Passes take the model's weights as they are."""

    def _prefill(self, piece: PassSlice) -> Tensor:
        assert not piece.sampled
        assert piece.start % self._chunk == 0
        ids = torch.zeros(self._chunk, dtype=torch.long)
        ids[: len(piece.ids)] = torch.tensor(piece.ids)
        places = torch.arange(piece.start, piece.start + self._chunk)
        rows = torch.full_like(places, piece.row)
        seen = self._columns[None] <= places.to(self._device)[:, None]
        view = CacheView(slice(piece.row, piece.row + 1), self._cache.width)
        return self._forward(ids[None], places[None], rows[None], seen[None], view, len(piece.ids) - 1)

    def _decode(self, pieces: Sequence[PassSlice]) -> Tensor:
        count = self._cache.rows
        ids = torch.zeros(count, dtype=torch.long)
        # Rows with nothing to decode write where nobody looks: the last column is only ever seen by a sequence that
        # has just written it itself.
        places = torch.full((count,), self._cache.width - 1)
        rows = [piece.row for piece in pieces]
        ids[rows] = torch.tensor([piece.ids[0] for piece in pieces])
        places[rows] = torch.tensor([piece.start for piece in pieces])
        seen = (self._columns <= places.to(self._device)[:, None])[:, None]
        view = CacheView(slice(0, count), self._cache.width)
        return self._forward(ids[:, None], places[:, None], torch.arange(count)[:, None], seen, view, 0)[rows]

    def _forward(self, ids: Tensor, places: Tensor, rows: Tensor, seen: Tensor, view: CacheView, keep: int) -> Tensor:
        """Logits of the `keep`-th token of each row of `ids`."""
        mask = torch.zeros(seen.shape, dtype=self._cache.layout.dtype, device=self._device)
        ids, places, rows = torch.stack([ids, places, rows]).to(self._device)
        self._cache.aim(rows.flatten(), places.flatten(), view)
        return self._model(
            input_ids=ids,
            position_ids=places.clamp(max=self._last),  # padding may stand after the last that the model knows
            attention_mask=mask.masked_fill_(~seen, self._lowest)[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor([keep], device=self._device),
        ).logits[:, 0]
