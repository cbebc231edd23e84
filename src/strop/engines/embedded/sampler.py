"""Draws one token per row and tells the logprob under the distribution it was really drawn from.

Each sequence brings a random stream of its own, so a draw depends on its own logits and seed and on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strop.types import Sampling


def sample(
    logits: Tensor, samplings: Sequence[Sampling], streams: Sequence[np.random.Generator]
) -> tuple[list[int], list[float]]:
    """logits [rows, vocabulary] -> drawn ids and their logprobs, one per row.

    The logprob is log_softmax(logits / T), before any truncation; turns with truncation are marked by their sampling.
    At T = 0 the best token is taken and the logprob is that of T = 1.
    """
    temperature = torch.tensor([s.temperature or 1.0 for s in samplings], dtype=logits.dtype, device=logits.device)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    probs = logprobs.double().exp()
    for row, sampling in enumerate(samplings):
        if sampling.truncated:
            probs[row] = truncate(probs[row], sampling)
    # Inverse of the cumulative distribution at one uniform number per row: every step of it works on each row alone.
    ladder = probs.cumsum(dim=-1)
    draws = torch.tensor([stream.random() for stream in streams], dtype=torch.float64, device=logits.device)
    ids = torch.searchsorted(ladder, (draws * ladder[:, -1])[:, None], right=True)[:, 0]
    ids = ids.clamp(max=logits.shape[-1] - 1)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    ids = torch.where(greedy, logits.argmax(dim=-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def truncate(probs: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k, top-p and min-p leave out; the rest keeps its proportions.

    >>> truncate(torch.tensor([0.5, 0.3, 0.2]), Sampling(top_p=0.6)).tolist()[2]
    0.0
    """
    order = probs.argsort(descending=True)
    ranked = probs[order]
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        keep &= ranked.cumsum(0) - ranked < sampling.top_p
    if sampling.min_p > 0.0:
        keep &= ranked >= sampling.min_p * ranked[0]
    kept = torch.zeros_like(probs)
    kept[order[keep]] = probs[order[keep]]
    return kept
