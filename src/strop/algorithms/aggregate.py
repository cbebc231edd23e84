"""How tokens are weighed against each other: every normaliser of the loss, taken over the whole batch.

A turn is a sequence. With l the loss of one token:

    token-mean          mean of l over all tokens
    sequence-mean       mean over turns of each one's mean of l
    sequence-sum        mean over turns of each one's sum of l
    sequence-sum-norm   the same, divided by the horizon: a number of tokens that is the same in every step
    rollout-mean        mean over rollouts of each one's mean of l, over all its turns
    rollout-sum-norm    mean over rollouts of each one's sum of l, divided by the horizon (Dr. GRPO, Liu et al. 2025,
                        https://arxiv.org/abs/2503.20783, with a rollout of many turns counted as one answer)

Where a rollout is one turn, these are verl's token-mean, seq-mean-token-mean, seq-mean-token-sum and
seq-mean-token-sum-norm; where it has several, verl's rows are rollouts and its seq-mean is over them.

The choices of one n > 1 request count 1/n each, their tokens and they themselves wherever turns are counted. What may
not be trained and what was dropped by now is not counted.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from strop.trajectory import Batch

Aggregation = Literal[
    "token-mean", "sequence-mean", "sequence-sum", "sequence-sum-norm", "rollout-mean", "rollout-sum-norm"
]


def aggregate(batch: Batch, kind: Aggregation, horizon: int) -> None:
    """Fill the entries' weight: 0 where one is not trainable or its rollout is dropped."""
    entries = batch.entries
    weight = np.where(batch.alive(), batch.shares(), 0.0)
    entries.weight[:] = weight
    if not weight.any():
        return
    turns = weight[entries.index == 0].sum()
    rollouts = len(np.unique(entries.rollout[weight > 0]))
    match kind:
        case "token-mean":
            entries.weight /= weight.sum()
        case "sequence-mean":
            entries.weight /= np.bincount(entries.turn)[entries.turn] * turns
        case "sequence-sum":
            entries.weight /= turns
        case "sequence-sum-norm":
            entries.weight /= turns * horizon
        case "rollout-mean":
            tokens = np.bincount(entries.rollout, weights=weight)
            entries.weight /= np.where(tokens > 0, tokens, 1.0)[entries.rollout] * rollouts
        case "rollout-sum-norm":
            entries.weight /= rollouts * horizon
