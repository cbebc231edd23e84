"""Group Relative Policy Optimization (Shao et al. 2024, https://arxiv.org/abs/2402.03300), without a KL term.

A rollout's advantage is its total minus its group's mean, divided by the group's standard deviation (unbiased, ddof 1,
plus 1e-6, as in verl) if configured. The baseline is over rollouts, each counted once, before anything is dropped.
A turn's own reward and an agent's add to the advantage of those turns (`credit.targeted`).

The loss is the clipped surrogate, averaged over all trained tokens of the batch; the choices of one n > 1 request count
1/n each. A group that teaches nothing is filtered: all totals equal is `zero_variance`, nobody to compare with is
`group_of_one`.

Left out: a KL penalty against a reference, sequence-mean aggregation, importance correction for stale rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from strop.algorithms.base import Algorithm, Tensor, View
from strop.algorithms.credit import EPSILON, spread, targeted, totals, unused
from strop.algorithms.losses import clipped
from strop.config import LearnerConfig
from strop.trajectory import Batch
from strop.trajectory.entries import Floats


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    clip: Annotated[float, Meta(gt=0, description="ratios are clipped to 1 - clip ... 1 + clip")] = 0.2
    clip_high: Annotated[float | None, Meta(description="upper clip; default: the same as clip")] = None
    normalize_std: Annotated[bool, Meta(description="divide advantages by the group's standard deviation")] = True


class GRPO(Algorithm):
    def __init__(self, rewards: Mapping[str, float], settings: Settings, *, updates: int = 1) -> None:
        self.rewards, self.settings = rewards, settings
        # With one optimizer step the proximal policy is the policy itself; from the second on it must be remembered.
        self.needs = frozenset({"proximal"} if updates > 1 else ())

    def credit(self, batch: Batch) -> dict[str, float]:
        entries = batch.entries
        reward = totals(batch, self.rewards)
        extra = targeted(batch, self.rewards)
        advantage = self._advantages(batch, reward, extra)
        alive = np.array([s.rollout.id not in batch.dropped for s in batch.samples], bool)
        choices = np.array([turn.choices for turn in batch.turns], np.float64)

        if len(entries):
            entries.advantage[:] = advantage[entries.rollout] + extra[entries.turn]
            entries.weight[:] = np.where(entries.trainable & alive[entries.rollout], 1.0 / choices[entries.turn], 0.0)
        trained = entries.weight > 0
        entries.advantage[~trained] = 0.0
        if trained.any():
            entries.weight /= entries.weight.sum()
        return {
            **spread("critic/rewards", reward[batch.counted]),
            **spread("critic/advantages", entries.advantage[trained]),
            **batch.counts(),
            **unused(batch, self.rewards),
        }

    def _advantages(self, batch: Batch, reward: Floats, extra: Floats) -> Floats:
        """One advantage per sample, 0 outside the baseline; drops the groups that teach nothing."""
        advantage = np.zeros(len(batch.samples))
        owner = batch.entries.rollout[batch.starts[:-1]]
        for g in range(len(batch.groups)):
            members = np.flatnonzero((batch.group == g) & batch.counted)
            values = reward[members]
            told_apart = bool(extra[batch.group[owner] == g].any())  # by rewards of turns or agents
            if len(members) < 2:
                reason = "group_of_one"
            elif values.min() == values.max() and not told_apart:
                reason = "zero_variance"
            else:
                scale = values.std(ddof=1) + EPSILON if self.settings.normalize_std else 1.0
                advantage[members] = (values - values.mean()) / scale
                continue
            for s in members:
                batch.drop(int(s), reason)
        return advantage

    def loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: View
    ) -> tuple[Tensor, dict[str, Tensor]]:
        low = self.settings.clip
        high = low if self.settings.clip_high is None else self.settings.clip_high
        return clipped(logp, entries.proximal, entries.advantage, low, high)


def make(rewards: Mapping[str, float], settings: Settings, learner: LearnerConfig) -> GRPO:
    return GRPO(rewards, settings, updates=learner.updates)
