"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) with a critic.

Advantages are estimated from the critic's values (`gae.py`), so no group is needed and none is filtered. They are
scaled to mean 0 and variance 1 over the trainable tokens of the batch if configured. The critic learns the returns;
what it says may move by `value_clip` from what it said when the step began before its loss stops falling.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from strop.algorithms.base import EntryTensors, Tensor
from strop.algorithms.credit import whiten
from strop.algorithms.gae import estimate_advantages, find_timed
from strop.algorithms.metrics import summarize
from strop.algorithms.policy_gradient import PolicyGradient, Positive, Share
from strop.algorithms.rewards import Rewards
from strop.trajectory import Batch
from strop.trajectory.batch import Floats


class PPO(PolicyGradient):
    """Proximal Policy Optimization, with a critic and generalised advantage estimation."""

    discount: Annotated[Share, Meta(description="discount factor (gamma) per sampled token")] = 1.0
    lam: Annotated[Share, Meta(description="GAE lambda: 0 trusts the critic's next value, 1 only the rewards")] = 1.0
    whiten: Annotated[bool, Meta(description="advantage whitening: scale to mean 0 and variance 1 over the batch")] = (
        True
    )
    value_clip: Annotated[Positive, Meta(description="value clip range: how far a value may move in one step")] = 0.5
    vf_coef: Annotated[float, Meta(ge=0, description="value function coefficient: weight of the critic's loss")] = 1.0

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"proximal", "value"}

    @property
    def compares_groups(self) -> bool:
        return False

    def compute_advantages(self, batch: Batch, rewards: Rewards) -> tuple[list[str | None], dict[str, float]]:
        entries = batch.entries
        rows = find_timed(batch)
        assert not np.isnan(entries.value[rows]).any(), "an entry has no value: score the batch before its credit"
        estimated = estimate_advantages(batch, rewards, entries.value, self.discount, self.lam)
        entries.advantage[:] = estimated
        entries.ret[rows] = (estimated + entries.value)[rows]
        trainable = rows & entries.trainable
        share = batch.shares()[trainable]
        if self.whiten and share.sum() > 1.0:
            entries.advantage[trainable] = whiten(estimated[trainable], share)
        return [None] * len(batch.turns), {
            **summarize("critic/values", entries.value[trainable]),
            **summarize("critic/returns", entries.ret[trainable]),
            **explain_variance(entries.ret[trainable], entries.value[trainable]),
        }

    def compute_loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: EntryTensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert value is not None, "PPO needs a critic"
        loss, metrics = super().compute_loss(logp, entropy, value, entries)
        value_loss, clipped = compute_value_loss(value, entries.value, entries.ret, self.value_clip)
        metrics["critic/vf_loss"] = value_loss.detach()
        metrics["critic/vf_clipfrac"] = clipped
        return loss + self.vf_coef * value_loss, metrics


def compute_value_loss(value: Tensor, before: Tensor, ret: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the square of what the critic is off by, per entry, and 1 where moving further does not lower it."""
    plain = (value - ret) ** 2
    held = (before + (value - before).clamp(-clip, clip) - ret) ** 2
    return 0.5 * plain.maximum(held), (held > plain).detach().to(value.dtype)


def explain_variance(ret: Floats, value: Floats) -> dict[str, float]:
    """The share of the returns' variance that the values foretold: 1 is all, below 0 is worse than their mean."""
    if len(ret) < 2:
        return {}
    return {"critic/vf_explained_var": float(1.0 - (ret - value).var(ddof=1) / (ret.var(ddof=1) + 1e-5))}
