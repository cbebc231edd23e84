"""Logprobs and entropies of entries, read from a piece of the token tree where their logits are.

Logits are made in the model's dtype, and their softmax in float32 at least. There are never more of them than a chunk,
neither forward nor backward: one chunk is kept for the backward pass, several are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.errors import ModelError
from strop.learner.attention import Tree, plan
from strop.learner.flex import flex_plan
from strop.trajectory import Entries, Piece

CHUNK = 2**24
"""Most logits in memory at once."""


@dataclass(frozen=True)
class Way:
    """How a model is run over a piece. `recompute`: keep only what enters each block for the backward pass."""

    attention: Literal["blocks", "flex"] = "blocks"
    recompute: bool = False


PLAIN = Way()


def hidden_states(
    model: PreTrainedModel, ids: np.ndarray, pos: np.ndarray, end: np.ndarray, way: Way = PLAIN
) -> Tensor:
    """The last hidden state of every token, [tokens, width]."""
    device = model.device
    tree: Tree = flex_plan(end, device) if way.attention == "flex" else plan(end, model.dtype, device)
    padding = (0, tree.size - len(ids))
    with _recomputing(model, way.recompute and torch.is_grad_enabled()):
        output = model.base_model(
            input_ids=torch.from_numpy(np.pad(ids, padding))[None].to(device),
            position_ids=torch.from_numpy(np.pad(pos, padding))[None].to(device),
            # A 4D mask is taken as it is, so that no N x N mask is made from pos.
            attention_mask=torch.zeros(1, 1, 1, 1, device=device),
            use_cache=False,
            tree=tree,
        )
    return output.last_hidden_state[0, : len(ids)]


def entry_states(model: PreTrainedModel, piece: Piece, way: Way = PLAIN) -> Tensor:
    """The hidden state that each entry's logits, or its value, are made of. [entries, width]"""
    hidden = hidden_states(model, piece.ids, piece.pos, piece.end, way)
    return hidden.index_select(0, torch.from_numpy(piece.at).to(hidden.device))


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The module that makes logits of hidden states."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} makes its logits in a way that is not known: use another model")
    return head


def logprobs(
    model: PreTrainedModel, piece: Piece, entries: Entries, *, chunk: int = CHUNK, way: Way = PLAIN
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / T) of each entry's target, and the entropy of that distribution; [entries] each."""
    return read(model, entry_states(model, piece, way), piece, entries, chunk=chunk)


def read(
    model: PreTrainedModel, states: Tensor, piece: Piece, entries: Entries, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """`logprobs`, from what `entry_states` gave."""
    target = torch.from_numpy(entries.target[piece.entry]).to(states.device)
    warmth = entries.temperature[piece.entry]
    # Greedy turns never train and are never compared; reading them at 1 only keeps them finite.
    temperature = torch.from_numpy(np.where(warmth > 0, warmth, 1.0)).to(states.device, _wide(states.dtype))
    head = head_of(model)
    rows = max(1, chunk // head.out_features)
    if len(states) <= rows:
        return _pick(_logps(states, head.weight, head.bias, temperature), target)
    logp, entropy = _Chunks.apply(states, head.weight, head.bias, target, temperature, rows)  # pyright: ignore
    return logp, entropy


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logps(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    logits = nn.functional.linear(states, weight, bias).to(temperature.dtype)
    return (logits / temperature[:, None]).log_softmax(-1)


def _pick(logps: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logps.gather(1, target[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


class _Chunks(torch.autograd.Function):
    """`_pick` of `_logps`, `rows` entries at a time, both ways. The head's gradient is summed in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty_like(temperature)
        entropy = torch.empty_like(temperature)
        for at in _slices(len(states), rows):
            logp[at], entropy[at] = _pick(_logps(states[at], weight, bias, temperature[at]), target[at])
        ctx.save_for_backward(states, weight, bias, target, temperature, entropy)
        ctx.rows = rows
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, for_logp: Tensor, for_entropy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        states, weight, bias, target, temperature, entropy = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_states = torch.empty_like(states) if wants_states else None
        to_weight = torch.zeros_like(weight, dtype=temperature.dtype) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=temperature.dtype) if bias is not None and wants_bias else None
        for at in _slices(len(states), ctx.rows):
            logps = _logps(states[at], weight, bias, temperature[at])
            probs = logps.exp()
            # d logp / d logits = 1 at the target - probs;  d entropy / d logits = - probs (logps + entropy)
            slope = logps.add_(entropy[at, None]).mul_(-for_entropy[at, None]).sub_(for_logp[at, None]).mul_(probs)
            slope.scatter_add_(1, target[at, None], for_logp[at, None])
            slope = slope.div_(temperature[at, None])
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            if to_states is not None:
                to_states[at] = slope @ weight
            if to_weight is not None:
                to_weight += slope.t() @ states[at]
        return (
            to_states,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(weight.dtype),
            None,
            None,
            None,
        )


def _slices(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


@contextmanager
def _recomputing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Blocks keep only their input until the end of this block. They look at `training`, which nothing else may see:
    an engine runs the same model."""
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if wanted else []
    if wanted and not blocks:
        raise ModelError(
            f"{type(model).__name__} does not know how to compute its blocks again: set "
            "learner.gradient_checkpointing to false"
        )
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for block in blocks:
        block.__dict__["_gradient_checkpointing_func"] = again
        block.gradient_checkpointing = block.training = True
    try:
        yield
    finally:
        for block in blocks:
            block.gradient_checkpointing = block.training = False
