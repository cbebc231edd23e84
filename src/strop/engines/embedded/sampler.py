"""Draws one token per row and tells the logprob under the distribution it was really drawn from.

Each sequence brings a random stream of its own, so a draw depends on its own logits and seed and on nothing beside it.
Only rows with penalties or cuts cost more than a pass over the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from strop.models.bits import unpack
from strop.models.grammar import Words
from strop.types import Sampling

BLOCK = 256
RANKED = 1024
"""How many of the best tokens are looked at first when a distribution is cut; all of them if that is too few."""


class Drawer(Protocol):
    """What a draw depends on, beside the logits. The first `num_prompt` of `ids` are the prompt, the rest was drawn.
    `allowed` is the mask of what may come next, where not everything may."""

    sampling: Sampling
    stream: np.random.Generator
    ids: list[int]
    num_prompt: int
    allowed: Words | None


def sample(logits: Tensor, drawers: Sequence[Drawer], *, precise: bool = False) -> tuple[list[int], list[float]]:
    """logits [rows, vocabulary] -> drawn ids and their logprobs, one per row; the logprob is NaN where logits are.

    The logprob is that of the distribution drawn from: after penalties, what a grammar forbids, temperature and cuts,
    normalised again. At temperature 0 the best token is taken and the logprob is that of temperature 1 before any cut.
    `precise` computes in float64, and on the CPU, where sums have one order.
    """
    logits = logits.double().cpu() if precise else logits.float()
    samplings = [drawer.sampling for drawer in drawers]
    if any(s.penalised for s in samplings):
        logits = penalise(logits.clone(), drawers)
    if any(drawer.allowed is not None for drawer in drawers):
        logits = forbid(logits, drawers)
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        warmth = torch.tensor([s.temperature or 1.0 for s in samplings], dtype=logits.dtype)
        logits = logits / warmth.to(logits.device)[:, None]
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    cut = [row for row, s in enumerate(samplings) if s.truncated and s.temperature > 0.0]
    if cut:
        # Precisely, row by row: how ties are broken at a cut may depend on how many candidates are looked at.
        for rows in [[row] for row in cut] if precise else [cut]:
            weights[rows] = truncate(logits[rows].log_softmax(-1), [samplings[row] for row in rows]).exp_()
    uniforms = torch.tensor([drawer.stream.random() for drawer in drawers], dtype=torch.float64)
    ids, whole = draw(weights, uniforms.to(logits.device))
    greedy = [row for row, s in enumerate(samplings) if s.temperature == 0.0]
    if greedy:
        ids[greedy] = logits[greedy].argmax(-1)
    chosen = (weights.gather(1, ids[:, None])[:, 0].double() / whole).log()
    drawn, told = torch.stack([ids.double(), chosen]).tolist()  # one transfer
    return [int(id) for id in drawn], told


def draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of each row's cumulative distribution at one uniform number in [0, 1): first the block of tokens,
    then the token in it. What has weight 0 is never drawn. Also what a row's weights add up to. [rows] each

    >>> draw(torch.tensor([[0.2, 0.0, 0.8]] * 3), torch.tensor([0.1, 0.25, 0.999], dtype=torch.float64))[0].tolist()
    [0, 2, 2]
    """
    vocabulary = weights.shape[1]
    count = -(-vocabulary // BLOCK)
    if missing := count * BLOCK - vocabulary:  # a pad of nothing would be a copy of all
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.unflatten(1, (count, BLOCK))
    ladder = blocks.sum(-1).double().cumsum(-1)
    block, rest = _climb(ladder, uniforms * ladder[:, -1])
    inner = blocks[torch.arange(len(block), device=block.device), block].double().cumsum(-1)
    return (block * BLOCK + _climb(inner, rest)[0]).clamp(max=vocabulary - 1), ladder[:, -1]


def _climb(ladder: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """The first rung above `height`, and what of the height lies above the rung below."""
    top = ladder[:, -1]
    height = torch.minimum(height, torch.nextafter(top, torch.zeros_like(top)))  # rounding may have put it on the top
    rung = torch.searchsorted(ladder, height[:, None], right=True).clamp(max=ladder.shape[1] - 1)
    below = torch.where(rung > 0, ladder.gather(1, (rung - 1).clamp(min=0)), 0.0)
    return rung[:, 0], height - below[:, 0]


def penalise(logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
    """Shift, in place, the logits of what was said before: repetition_penalty looks at prompt and answer and scales,
    the other two look at the answer and subtract."""
    for row, drawer in enumerate(drawers):
        s = drawer.sampling
        if s.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(drawer.ids)).to(logits.device)
            found = logits[row, seen]
            logits[row, seen] = torch.where(found < 0, found * s.repetition_penalty, found / s.repetition_penalty)
        sampled = drawer.ids[drawer.num_prompt :]
        if (s.presence_penalty or s.frequency_penalty) and sampled:
            said, counts = np.unique(sampled, return_counts=True)
            shift = torch.from_numpy(s.presence_penalty + s.frequency_penalty * counts)
            logits[row, torch.from_numpy(said).to(logits.device)] -= shift.to(logits.device, logits.dtype)
    return logits


def forbid(logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
    """A copy in which what a row's grammar does not allow has -inf."""
    held = [(row, drawer.allowed) for row, drawer in enumerate(drawers) if drawer.allowed is not None]
    masks = torch.from_numpy(~np.stack([mask for _, mask in held]).view(np.int32)).to(logits.device)
    forbidden = unpack(masks, logits.shape[1])
    if len(held) == len(logits):
        return logits.masked_fill(forbidden, -torch.inf)
    rows = torch.tensor([row for row, _ in held], device=logits.device)
    return logits.index_put((rows,), logits[rows].masked_fill_(forbidden, -torch.inf))


def truncate(logprobs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Rows of logprobs [rows, vocabulary] without what top-k, then top-p of the rest, then min-p leave out, normalised
    again. What is cut has -inf.

    >>> truncate(torch.tensor([[0.5, 0.3, 0.2]]).log(), [Sampling(top_p=0.6)]).exp().tolist()[0][2]
    0.0
    """
    vocabulary = logprobs.shape[1]
    device = logprobs.device
    top_k = torch.tensor([s.top_k if s.top_k > 0 else vocabulary for s in samplings]).to(device)[:, None]
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64).to(device)[:, None]
    min_p = torch.tensor([s.min_p for s in samplings], dtype=torch.float64).to(device)[:, None]
    for size in (min(RANKED, vocabulary), vocabulary):
        ranked, order = logprobs.topk(size, dim=-1)
        rank = torch.arange(size, device=device)[None]
        probs = ranked.double().exp().masked_fill(rank >= top_k, 0.0)
        # Without top-k the whole is 1, of which the best may be a part only.
        whole = torch.where(top_k < vocabulary, probs.sum(-1, keepdim=True), 1.0)
        kept = (rank < top_k) & ((probs.cumsum(-1) - probs < top_p * whole) | (top_p >= 1.0))
        kept &= probs >= min_p * probs[:, :1]
        # The rules cut from the end: where the last one looked at is cut, so is all that was not looked at.
        if size == vocabulary or (
            not kept[:, -1].any() and bool((top_k <= size).logical_or(top_k == vocabulary).all())
        ):
            break
    ranked = ranked.masked_fill(~kept, -torch.inf)
    ranked = ranked - ranked.logsumexp(-1, keepdim=True)
    return torch.full_like(logprobs, -torch.inf).scatter_(1, order, ranked)
