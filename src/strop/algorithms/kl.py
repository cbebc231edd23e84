"""The distance to a reference policy, estimated from the sampled tokens (http://joschu.net/blog/kl-approx.html).

With d = logp - ref, the logarithm of how much likelier the policy finds a token than the reference does:

    k1        d                      unbiased; below 0 for single tokens
    k2        d² / 2                 biased, little variance
    k3        exp(-d) + d - 1        unbiased, never below 0, less variance than k1; d is held within -20 ... 20
    low_var   k3, at most 10         what verl calls k3 and low_var_kl
    abs       |d|

In the loss it is the gradient that counts. On the policy's own samples k2's is that of the divergence from policy to
reference, k3's that of the divergence from reference to policy, k1's is 0 on average and keeps nothing near anything.
In the reward it is the value that counts, and k1 is unbiased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from strop.algorithms.base import Tensor
from strop.algorithms.losses import LIMIT
from strop.algorithms.rewards import Rewards
from strop.trajectory import Batch

Estimator = Literal["k1", "k2", "k3", "abs", "low_var"]

MOST = 10.0
"""The most that low_var finds for one token."""


def estimate(kind: Estimator, logp: Tensor, ref: Tensor) -> Tensor:
    """The distance to the reference, one number per entry; the gradient flows through `logp`."""
    return _distance(kind, logp - ref, lambda x: x.exp())


def penalise_rewards(batch: Batch, rewards: Rewards, kind: Estimator, coef: float) -> float:
    """Take coef x distance off the reward of every trainable token, and return the mean over rollouts of each one's
    mean distance per token, as verl does.

    The penalties go into `rewards.tokens`, where a critic finds them on the tokens they are for; `rewards.totals` stay
    the outcome, and an algorithm that compares outcomes adds the tokens up (`Rewards.outcomes`). The choices of one
    n > 1 request have 1/n of theirs, and count 1/n in the mean.
    """
    entries = batch.entries
    for name, column in (("proximal", entries.proximal), ("ref", entries.ref)):
        missing = np.flatnonzero(np.isnan(column))
        assert not len(missing), (
            f"turn {batch.turns[int(entries.turn[missing[0]])].id} has no {name} logprobs: "
            "score the batch before its credit"
        )
    weight = np.where(entries.trainable, batch.shares(), 0.0)
    distance = weight * _distance(kind, entries.proximal - entries.ref, np.exp)
    rewards.tokens -= coef * distance
    tokens = np.bincount(entries.rollout, weight)
    distances = np.bincount(entries.rollout, distance)[tokens > 0]
    return float((distances / tokens[tokens > 0]).mean()) if weight.any() else 0.0


@dataclass
class AdaptiveCoefficient:
    """A coefficient that rises while the distance is above its target and falls while it is below (Ziegler et al. 2019,
    https://arxiv.org/abs/1909.08593), by a fifth at most per `horizon` rollouts. Without a target it is fixed.

    >>> kl = AdaptiveCoefficient(0.1, target=2.0, horizon=100)
    >>> kl.follow(2.2, rollouts=50)
    >>> round(kl.coef, 6)
    0.105
    """

    coef: float
    target: float | None
    horizon: int

    def follow(self, distance: float, rollouts: int) -> None:
        if self.target is not None:
            error = min(max(distance / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * rollouts / self.horizon


def _distance(kind: Estimator, d: Any, exp: Callable[[Any], Any]) -> Any:
    """For tensors and arrays alike, which differ in how they spell the exponential."""
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2.0
        case "abs":
            return abs(d)
        case "k3" | "low_var":
            d = d.clip(-LIMIT, LIMIT)
            k3 = exp(-d) + d - 1.0
            return k3.clip(-MOST, MOST) if kind == "low_var" else k3
