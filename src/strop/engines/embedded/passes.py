"""What one pass through the model is asked for, and how a model is told apart that cannot be served."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from strop.engines.embedded.cache import Cache, CacheView, Layout
from strop.errors import ModelError


class PassSlice(NamedTuple):
    """Tokens of one sequence whose turn it is: they go to `row`, from column `start` on. `sampled`: it is the one token
    drawn last. `last`: nothing of the sequence is left after them, so the logits of their last one are wanted."""

    row: int
    start: int
    ids: Sequence[int]
    sampled: bool
    last: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class Passes(Protocol):
    """A way to run pieces through the model."""

    def run(self, pieces: Sequence[PassSlice]) -> Tensor:
        """Write the pieces' keys; the logits of those with `last`, in their order. [wanted, vocabulary]"""
        ...

    def refresh(self) -> None:
        """The model's weights have changed."""
        ...


@contextmanager
def use_attention(model: Any, name: str) -> Iterator[None]:
    """Run the model with the attention registered as `name`, and leave it as it was."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def end_to_end(pieces: Sequence[PassSlice]) -> np.ndarray:
    """[3, tokens]: ids, columns, rows."""
    lengths = np.array([len(piece.ids) for piece in pieces])
    total = int(lengths.sum())
    laid = np.empty((3, total), np.int64)
    laid[0] = np.fromiter(chain.from_iterable([piece.ids for piece in pieces]), np.int64, total)
    starts, rows = np.array([piece.start for piece in pieces]), np.array([piece.row for piece in pieces])
    if total == len(pieces):
        laid[1:] = starts, rows
    else:
        laid[1] = np.arange(total) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        laid[2] = np.repeat(rows, lengths)
    return laid


def forward(model: Any, cache: Cache, attention: str, inputs: Tensor, wanted: Tensor, **plan: Any) -> Tensor:
    """One pass over tokens laid end to end [3, tokens], under the attention of that name, which gets `plan`; logits of
    the `wanted` tokens. [wanted, vocabulary]"""
    tokens, places, rows = inputs
    cache.aim(rows, places, CacheView(slice(None), cache.width))
    with use_attention(model, attention):
        output = model(
            input_ids=tokens[None],
            position_ids=places[None],
            attention_mask=torch.zeros(1, 1, 1, 1, device=inputs.device),  # 4D: taken as it is, so that none is made
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=wanted,
            **plan,
        )
    return output.logits[0]


def refuse_more(module: Any, asked: dict[str, Any]) -> None:
    """Raise if a layer asks its attention for something that is not done here."""
    if any(asked.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")):
        raise ModelError(f"{type(module).__name__} does more than full attention: the embedded engine does not know it")


PROBE = ((3, 5, 7, 9, 11, 13), (3, 5, 13, 11, 9, 7))
"""In sixteenths of the vocabulary, whose first ids are often special ones, which bfloat16 rounds worst of all."""


@torch.inference_mode()
def measure_model(model: Any) -> tuple[Layout, Tensor]:
    """The shapes of this model's keys and values, and its own logits of `PROBE`, from one pass as it comes."""
    rope = getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None) or {}
    if rope.get("rope_type") == "longrope":
        raise ModelError(
            f"{type(model).__name__} turns positions by the longest sequence of a pass (longrope), so that a sequence "
            "would depend on its neighbours. Fix: use another model, or vllm"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{type(model).__name__} cannot be asked for the logits of some tokens only. Fix: use another model"
        )
    cache = DynamicCache()
    ids = torch.tensor(_probes(model), device=model.device)
    with use_attention(model, "eager"):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    found: list[tuple[int, int, int]] = []
    dtype = logits.dtype
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[-2] != ids.shape[1]:
            raise ModelError(
                f"{type(model).__name__} has layers that are not full attention. Fix: use one where all are"
            )
        found.append((keys.shape[1], keys.shape[3], values.shape[3]))
        dtype = keys.dtype
    return Layout(tuple(found), dtype, logits.device), logits


@torch.inference_mode()
def check(model: Any, passes: Passes, wanted: Tensor, *, rows: int, chunk: int) -> None:
    """Refuse a model that gives other logits here than by itself: it does more in attention than is known of it."""
    wanted = wanted[:rows]
    probes = _probes(model)[:rows]
    half = len(probes[0]) - 2
    first = wanted
    for start in range(0, half, chunk):
        stop = min(half, start + chunk)
        first = passes.run(
            [PassSlice(row, start, ids[start:stop], False, stop == half) for row, ids in enumerate(probes)]
        )
    first = first.clone()  # a recorded pass gives the same memory again
    second = passes.run([PassSlice(row, half, ids[half : half + 1], True, True) for row, ids in enumerate(probes)])
    far = torch.stack([first - wanted[:, half - 1], second - wanted[:, half]]).float().abs()
    if wanted.dtype.itemsize >= 4:
        alike = far.max() <= 1e-4 * wanted.abs().max()
    else:  # single logits are off by a unit or more, by either way
        alike = far.mean() <= 0.1 * wanted.float().std()
    if not alike:
        raise ModelError(
            f"{type(model).__name__} gives other logits in the embedded engine than by itself. Fix: use vllm"
        )


def _probes(model: Any) -> list[list[int]]:
    return [[int(model.config.vocab_size) * i // 16 for i in ids] for ids in PROBE]
