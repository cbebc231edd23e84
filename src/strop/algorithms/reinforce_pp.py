"""REINFORCE++ (Hu 2025, https://arxiv.org/abs/2501.03262): one scale for the whole batch instead of one per group.

    baseline = false   a token's return, nothing discounted, shifted and scaled to mean 0 and variance 1 over the batch
    baseline = true    the total minus its group's mean first, a turn's own reward as in GRPO; then the same

Mean and variance are over rollouts, each counted once with all its tokens, before anything is dropped: a long rollout
does not outweigh a short one. Without `baseline` groups may be of one; where a whole batch is equal it teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta

from strop.algorithms import grpo, policy_gradient
from strop.algorithms.credit import Rewards, compare, scores, shares, whiten
from strop.algorithms.gae import advantages, in_time
from strop.algorithms.grpo import GRPO
from strop.algorithms.policy_gradient import PolicyGradient
from strop.config import LearnerConfig
from strop.trajectory import Batch
from strop.trajectory.entries import Floats


class Settings(policy_gradient.Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    baseline: Annotated[bool, Meta(description="take the group's mean off before the batch is scaled")] = False


class ReinforcePP(PolicyGradient[Settings]):
    def __init__(self, rewards: Mapping[str, float], settings: Settings, learner: LearnerConfig) -> None:
        super().__init__(rewards, settings, learner)
        self.within_groups = settings.baseline
        self._grouped = GRPO(rewards, grpo.Settings(normalize_std=False), learner)

    def advantages(self, batch: Batch, rewards: Rewards) -> dict[str, float]:
        without = rewards.outcomes(batch)
        if self.settings.baseline:
            compared = scores(batch, rewards, "outcome", "group", discount=1.0, terminal_share=1.0)
            without[compared.sample] = compare(compared, std=False)[0]
            self._grouped.advantages(batch, rewards)
        else:
            nothing = np.zeros(len(batch.entries))
            batch.entries.advantage[:] = advantages(batch, rewards, nothing, discount=1.0, lam=1.0)
        self._whiten(batch, without)
        return {}

    def _whiten(self, batch: Batch, without: Floats) -> None:
        """Scale the entries' advantages over all samples of the baseline; one without entries counts as `without`."""
        entries = batch.entries
        rows = in_time(batch)
        weight = np.where(rows, shares(batch), 0.0)
        each = np.bincount(entries.rollout, weight, minlength=len(batch.samples))
        missing = np.flatnonzero(batch.counted & (each == 0))
        values = np.concatenate([entries.advantage[rows], without[missing]])
        weights = np.concatenate(
            [(weight / np.where(each > 0, each, 1.0)[entries.rollout])[rows], np.ones(len(missing))]
        )
        counted = np.flatnonzero(batch.counted)
        if len(counted) < 2 or values.min() == values.max():
            for s in counted:
                batch.drop(int(s), "group_of_one" if len(counted) < 2 else "zero_variance")
            entries.advantage[rows] = 0.0
            return
        entries.advantage[rows] = whiten(values, weights)[: rows.sum()]


def make(rewards: Mapping[str, float], settings: Settings, learner: LearnerConfig) -> ReinforcePP:
    return ReinforcePP(rewards, settings, learner)
