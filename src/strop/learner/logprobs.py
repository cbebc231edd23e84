"""Logprobs and entropies of entries, read from a piece of the token tree where their logits are.

Logits are made in the model's dtype, and their softmax in float32 at least. There are never more of them than a chunk,
neither forward nor backward. On a CPU a piece that needs but one chunk keeps it for the backward pass; otherwise logits
are computed again. What is made of a chunk can be compiled into one kernel each way. What a grammar forbade has no part
in it (masks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.errors import ModelError
from strop.learner.blocks import PLAIN, Way, apply_way
from strop.learner.device import send
from strop.learner.flex_attention import build_flex_plan, padded_size
from strop.learner.masks import EntryMasks
from strop.learner.sequence_parallel import SplitTree
from strop.learner.tree_attention import Tree, plan
from strop.models.bits import unpack
from strop.trajectory import Entries, MicroBatch

CHUNK = {"cpu": 2**24, "cuda": 2**28}
"""Most logits in memory at once, by kind of device. A head's gradient is read and written once a chunk."""

LEAST = -1e30
"""What stands for the logit of what may not be drawn: a probability of 0, and no infinity that 0 times it were."""


def compute_hidden_states(
    model: PreTrainedModel, ids: np.ndarray, pos: np.ndarray, end: np.ndarray, way: Way = PLAIN
) -> Tensor:
    """The last hidden state of every token, [tokens, width]; of a rank's own, where several run the model together."""
    device = model.device
    tree: Tree = build_flex_plan(end, device) if way.attention == "flex" else plan(end, model.dtype, device)
    padding = (0, tree.size - len(ids))
    there, where = (send(np.pad(array, padding)[None], device) for array in (ids, pos))
    if way.split is not None:
        split = way.split
        return run_blocks(model, split.split(there), split.split(where), SplitTree(tree, split), way)[0]
    return run_blocks(model, there, where, tree, way)[0, : len(ids)]


def run_blocks(model: PreTrainedModel, ids: Tensor, pos: Tensor, tree: Tree, way: Way) -> Tensor:
    """The last hidden state of ids at positions [1, tokens], padding included. [1, tokens, width]"""
    with apply_way(model, way):
        output = model.base_model(
            input_ids=ids,
            position_ids=pos,
            # A 4D mask is taken as it is, so that no N x N mask is made from pos.
            attention_mask=torch.zeros(1, 1, 1, 1, device=ids.device),
            use_cache=False,
            tree=tree,
        )
    return output.last_hidden_state


def compute_entry_states(model: PreTrainedModel, piece: MicroBatch, way: Way = PLAIN) -> Tensor:
    """The hidden state that each entry's logits, or its value, are made of. [entries, width]; of a rank's own entries,
    where several run the model together: what is made of those is put together by `gather_entries`."""
    hidden = compute_hidden_states(model, piece.ids, piece.pos, piece.end, way)
    piece = _take_own(piece, way)
    return hidden.index_select(0, send(piece.at, hidden.device))


def find_head(model: PreTrainedModel) -> nn.Linear:
    """The module that makes logits of hidden states."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} makes its logits in a way that is not known. Fix: use another model")
    return head


def compute_logprobs(
    model: PreTrainedModel,
    piece: MicroBatch,
    entries: Entries,
    *,
    masks: EntryMasks | None = None,
    chunk: int | None = None,
    way: Way = PLAIN,
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / T) of each entry's target, and the entropy of that distribution; [entries] each."""
    states = compute_entry_states(model, piece, way)
    return read(model, states, piece, entries, masks=masks, chunk=chunk, compile=way.compile)


class TreeReader(nn.Module):
    """A model as a learner reads it: one call for each piece."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, piece: MicroBatch, entries: Entries, way: Way, masks: EntryMasks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states of entries, their logprobs and entropies."""
        states = compute_entry_states(self.model, piece, way)
        logp, entropy = read(self.model, states, _take_own(piece, way), entries, masks=masks, compile=way.compile)
        return states, gather_entries(logp, piece, way), gather_entries(entropy, piece, way)


def gather_entries(column: Tensor, piece: MicroBatch, way: Way) -> Tensor:
    """A column of all of a piece's entries, [entries], from what this rank has of it."""
    if way.split is None:
        return column
    return way.split.gather_entries(column, way.split.find_own(piece, _count_laid_out(piece, way)))


def _take_own(piece: MicroBatch, way: Way) -> MicroBatch:
    return piece if way.split is None else way.split.take_own(piece, _count_laid_out(piece, way))


def _count_laid_out(piece: MicroBatch, way: Way) -> int:
    return padded_size(len(piece.ids)) if way.attention == "flex" else len(piece.ids)


def read(
    model: PreTrainedModel,
    states: Tensor,
    piece: MicroBatch,
    entries: Entries,
    *,
    masks: EntryMasks | None = None,
    chunk: int | None = None,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """`compute_logprobs`, from what `compute_entry_states` gave."""
    target = send(entries.target[piece.entry], states.device)
    warmth = entries.temperature[piece.entry]
    # Greedy turns never train and are never compared; reading them at 1 only keeps them finite.
    temperature = send(np.where(warmth > 0, warmth, 1.0), states.device, _wide(states.dtype))
    head = find_head(model)
    rows = max(1, (chunk or CHUNK[states.device.type]) // head.out_features)
    allowed = masks.take(piece.entry, states.device) if masks is not None else None
    if len(states) <= rows and not states.is_cuda:
        return _pick(nn.functional.linear(states, head.weight, head.bias), target, temperature, allowed)[:2]
    given = (states, head.weight, head.bias, target, temperature, allowed)
    logp, entropy = _Chunks.apply(*given, rows, compile)  # pyright: ignore
    return logp, entropy


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pick(
    logits: Tensor, target: Tensor, temperature: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of the target, entropy, and what was taken from all logits to make logprobs of them; per row. What is not
    `allowed`, bits of a mask where there are any, has no part in it."""
    logits = logits.to(temperature.dtype) / temperature[:, None]
    if allowed is not None:
        logits = logits.masked_fill(~unpack(allowed, logits.shape[1]), LEAST)
    total = logits.logsumexp(-1)
    logps = logits - total[:, None]
    return logps.gather(1, target[:, None])[:, 0], -(logps.exp() * logps).sum(-1), total


def _slope(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor,
    allowed: Tensor | None,
    total: Tensor,
    entropy: Tensor,
    for_logp: Tensor,
    for_entropy: Tensor,
) -> Tensor:
    """The gradient of the logits, in their dtype, from that of what `_pick` gave."""
    warm = logits.to(temperature.dtype) / temperature[:, None]
    if allowed is not None:
        warm = warm.masked_fill(~unpack(allowed, logits.shape[1]), LEAST)
    logps = warm - total[:, None]
    # d logp / d logits = 1 at the target - probs;  d entropy / d logits = - probs (logps + entropy)
    push = ((logps + entropy[:, None]) * for_entropy[:, None] + for_logp[:, None]) * logps.exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    slope = torch.where(hit, for_logp[:, None] - push, -push)
    return (slope / temperature[:, None]).to(logits.dtype)


@cache
def _fused(made_of_a_chunk: Any, compile: bool) -> Any:
    return torch.compile(made_of_a_chunk, dynamic=True) if compile else made_of_a_chunk


class _Chunks(torch.autograd.Function):
    """`_pick`, `rows` entries at a time, both ways. The head's gradient is summed in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        allowed: Tensor | None,
        rows: int,
        compile: bool,
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, total = (torch.empty_like(temperature) for _ in range(3))
        pick = _fused(_pick, compile)
        for at in _slices(len(states), rows):
            logits = nn.functional.linear(states[at], weight, bias)
            some = allowed[at] if allowed is not None else None
            logp[at], entropy[at], total[at] = pick(logits, target[at], temperature[at], some)
        ctx.save_for_backward(states, weight, bias, target, temperature, allowed, total, entropy)
        ctx.rows, ctx.compile = rows, compile
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, for_logp: Tensor, for_entropy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        states, weight, bias, target, temperature, allowed, total, entropy = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_states = torch.empty_like(states) if wants_states else None
        to_weight = torch.zeros_like(weight, dtype=temperature.dtype) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=temperature.dtype) if bias is not None and wants_bias else None
        slope_of = _fused(_slope, ctx.compile)
        for at in _slices(len(states), ctx.rows):
            logits = nn.functional.linear(states[at], weight, bias)
            per_row = (target, temperature, allowed, total, entropy, for_logp, for_entropy)
            slope = slope_of(logits, *(None if column is None else column[at] for column in per_row))
            if to_bias is not None:
                to_bias += slope.sum(0, dtype=to_bias.dtype)
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
            None,
            None,
        )


def _slices(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
