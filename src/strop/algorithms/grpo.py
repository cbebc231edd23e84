"""Group Relative Policy Optimization (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

A rollout's advantage is its total minus its group's mean, divided by the group's standard deviation (unbiased, ddof 1,
plus 1e-6, as in verl) if configured. The baseline is over rollouts, each counted once, before anything is dropped.
A turn's own reward and an agent's add to the advantage of those turns (`credit.compare_targeted`).

    baseline = "agent", "role"   what is compared is each agent's part: the total and what the agent got of its own
    baseline = "joint"           the same with one mean and standard deviation over the parts of all agents that spoke,
                                 those of other policies and untrained ones too. Agents whose rewards differ in scale
                                 or in mean then move each other's gradients: Dr. MAS (2026) calls this global
                                 normalisation and finds it unstable, unlike "agent" (benchmarks/normalisation.py)
    credit = "to_go"             what is compared is each turn's return: what it and later ones got of their own, and
                                 the outcome, by `discount` less for each turn before the last

What teaches nothing is told apart: all equal is `zero_variance`, nobody to compare with is `group_of_one`. That is
whole groups, or the turns of one agent where only its part of the group is so. As in verl the former count in the
loss's denominators, and carry KL and entropy; `filter_groups` leaves them out.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from strop.algorithms.credit import Baseline, Credit, collect_scores, compare, compare_targeted
from strop.algorithms.policy_gradient import PolicyGradient, Share
from strop.algorithms.rewards import Rewards
from strop.trajectory import Batch
from strop.trajectory.batch import Floats


class GRPO(PolicyGradient):
    """Group Relative Policy Optimization: rollouts of one task are compared with each other."""

    normalize_std: Annotated[bool, Meta(description="divide advantages by the standard deviation of the group")] = True
    baseline: Annotated[
        Baseline,
        Meta(
            description="baseline: the mean of the whole group, of the same agent in it, of agents of one role, or of "
            "all its agents' scores (joint)"
        ),
    ] = "group"
    credit: Annotated[
        Credit, Meta(description="credit assignment: by the rollout's outcome, or by each turn's reward-to-go")
    ] = "outcome"
    discount: Annotated[Share, Meta(description="discount factor (gamma) per turn, with credit = to_go")] = 1.0
    terminal_share: Annotated[
        Share, Meta(description="with credit = to_go: share of the rollout's total that its last turn gets")
    ] = 1.0

    leave_one_out = False

    def compute_advantages(self, batch: Batch, rewards: Rewards) -> tuple[list[str | None], dict[str, float]]:
        compared = collect_scores(batch, rewards, self.credit, self.baseline, self.discount, self.terminal_share)
        bare = "group_of_one" not in self.filter_groups
        advantage, reasons = compare(compared, std=self.normalize_std, leave_one_out=self.leave_one_out, bare=bare)
        extra = self.extra(batch, rewards)
        per_turn = np.append(advantage, 0.0)[compared.turn] + extra
        batch.entries.advantage[:] = per_turn[batch.entries.turn]
        told_apart = {int(compared.key[k]) for k in compared.turn[extra != 0] if k >= 0}
        nothing: list[str | None] = [
            None if why == "zero_variance" and int(key) in told_apart else why
            for why, key in zip(reasons, compared.key, strict=True)
        ]
        return [nothing[int(k)] if k >= 0 else None for k in compared.turn], {}

    def extra(self, batch: Batch, rewards: Rewards) -> Floats:
        """What is added to each turn's advantage, [turns]."""
        if self.credit == "to_go":
            return np.zeros(len(batch.turns))
        return compare_targeted(batch, self.rewards, agents=self.baseline == "group")
