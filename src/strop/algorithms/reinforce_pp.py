"""REINFORCE++ (Hu 2025, https://arxiv.org/abs/2501.03262): one scale for the whole batch instead of one per group.

    baseline = false   a token's return, nothing discounted, shifted and scaled to mean 0 and variance 1 over the batch
    baseline = true    the total minus its group's mean first, a turn's own reward as in GRPO; then the same

    normalize_over = "tokens"    mean and variance are over the tokens that may be trained, as in verl
    normalize_over = "rollouts"  over rollouts, each counted once with all its tokens, before anything is dropped: a
                                 long rollout does not outweigh a short one

Without `baseline` groups may be of one. Where a whole batch is equal it teaches nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from strop.algorithms.credit import collect_scores, compare, whiten
from strop.algorithms.gae import estimate_advantages, find_timed
from strop.algorithms.grpo import GRPO
from strop.algorithms.policy_gradient import PolicyGradient
from strop.algorithms.rewards import Rewards
from strop.trajectory import Batch
from strop.trajectory.batch import Floats


class ReinforcePP(PolicyGradient):
    """REINFORCE++: advantages scaled over the whole batch, with or without the group's mean as baseline."""

    baseline: Annotated[
        bool, Meta(description="group baseline: subtract the group's mean before the batch is normalised")
    ] = False
    normalize_over: Annotated[
        Literal["tokens", "rollouts"],
        Meta(description="advantage normalisation over tokens, or over rollouts, each counted once"),
    ] = "tokens"

    @property
    def compares_groups(self) -> bool:
        return self.baseline

    def compute_advantages(self, batch: Batch, rewards: Rewards) -> tuple[list[str | None], dict[str, float]]:
        nothing: list[str | None] = [None] * len(batch.turns)
        without = rewards.outcomes(batch)
        if self.baseline:
            bare = "group_of_one" not in self.filter_groups
            compared = collect_scores(batch, rewards, "outcome", "group", discount=1.0, terminal_share=1.0)
            without[compared.sample] = compare(compared, std=False, bare=bare)[0]
            grouped = GRPO(rewards=self.rewards, normalize_std=False, filter_groups=self.filter_groups)
            nothing = grouped.compute_advantages(batch, rewards)[0]
        else:
            zeros = np.zeros(len(batch.entries))
            batch.entries.advantage[:] = estimate_advantages(batch, rewards, zeros, discount=1.0, lam=1.0)
        whole = self.normalize_over == "rollouts"
        why = self._over_rollouts(batch, without) if whole else self._over_tokens(batch, nothing)
        if why is not None:
            batch.entries.advantage[:] = 0.0
            return [why] * len(batch.turns), {}
        if "zero_variance" not in self.filter_groups:  # such a group is above or below the rest of the batch
            nothing = [None if one == "zero_variance" else one for one in nothing]
        return nothing, {}

    def _over_tokens(self, batch: Batch, nothing: list[str | None]) -> str | None:
        """Scale the advantages of all tokens that may be trained, or say why that would teach nothing."""
        entries = batch.entries
        compared = np.array([why != "group_of_one" or why not in self.filter_groups for why in nothing], bool)
        rows = find_timed(batch) & entries.trainable & compared[entries.turn]
        values, share = entries.advantage[rows], batch.shares()[rows]
        if share.sum() <= 1.0 or values.min() == values.max():
            return "group_of_one" if len(np.unique(entries.rollout[rows])) < 2 else "zero_variance"
        entries.advantage[rows] = whiten(values, share)
        return None

    def _over_rollouts(self, batch: Batch, without: Floats) -> str | None:
        """Scale the advantages over all samples of the baseline; one without entries counts as `without`."""
        entries = batch.entries
        rows = find_timed(batch)
        weight = np.where(rows, batch.shares(), 0.0)
        each = np.bincount(entries.rollout, weight, minlength=len(batch.samples))
        missing = np.flatnonzero(batch.counted & (each == 0))
        values = np.concatenate([entries.advantage[rows], without[missing]])
        weights = np.concatenate(
            [(weight / np.where(each > 0, each, 1.0)[entries.rollout])[rows], np.ones(len(missing))]
        )
        if batch.counted.sum() < 2 or values.min() == values.max():
            return "group_of_one" if batch.counted.sum() < 2 else "zero_variance"
        entries.advantage[rows] = whiten(values, weights)[: rows.sum()]
        return None
