"""On-policy distillation: the student samples, and a teacher says of every token how likely it would have been
(Agarwal et al. 2023, https://arxiv.org/abs/2306.13649; Gu et al. 2023, https://arxiv.org/abs/2306.08543).

    token        12     *      4      <|im_end|>
    student    -0.11  -0.92  -0.05   -0.01          the learner's logprob when the step began (`proximal`)
    teacher    -0.10  -3.20  -0.04   -0.01          of the same tokens in the same context, at the same temperature
    kl         -0.01   2.28  -0.01    0.00          student - teacher: one sample of the reverse KL at this token
    advantage   0.01  -2.28   0.01    0.00          its negative

The expectation of student - teacher over the student's own samples is KL(student || teacher), and the policy gradient
with the negative as reward of each token is the gradient of it, but for what a token does to the contexts of later ones
(`kl_discount` lets it answer for those of its own turn). It is 0 where both agree, so that nothing is forgotten there.

No reward is needed. Rewards that are given are shown, and with `reward_coef` what GRPO makes of them is added. Failed
rollouts count as algorithm.failures says: what the student said in one is its own all the same, unless it is excluded.

Who the teacher is, and how it reads what the student said, is the loop's business (run/teacher.py).

Left out: losses over the whole distribution of a token (the teacher is asked of sampled tokens only), and samples of
the teacher.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from strop.algorithms.base import TeacherSource
from strop.algorithms.grpo import GRPO
from strop.algorithms.policy_gradient import Share
from strop.algorithms.rewards import Rewards
from strop.config import LearnerConfig, PolicyConfig
from strop.errors import ConfigError
from strop.trajectory import Batch
from strop.trajectory.batch import Floats


class Distill(GRPO):
    """On-policy distillation: the reverse KL to a teacher on the student's own samples, token by token."""

    teacher: Annotated[
        str,
        Meta(
            description="who teaches: a frozen policy of the run, self (the policy's own present weights, with a "
            "teacher_prompt), or a model: a name, a folder, RUN, RUN:STEP or RUN:best"
        ),
    ] = ""
    teacher_prompt: Annotated[
        str, Meta(description="text that only the teacher sees, in the system message: hints, or a better prompt")
    ] = ""
    kl_discount: Annotated[
        Share,
        Meta(description="discount factor per token: how far a token answers for the KL of later ones of its turn"),
    ] = 0.0
    reward_coef: Annotated[
        float, Meta(ge=0, description="weight of group-relative advantages of the rewards beside the KL; 0: none")
    ] = 0.0

    def prepare(self, learner: LearnerConfig, policy: PolicyConfig) -> None:
        super().prepare(learner, policy)
        for name, value in (("kl", "reward"), ("overlong", "penalise")):
            if getattr(self, name) == value and not self.reward_coef:
                raise ConfigError(
                    f"algorithm.settings.{name} is {value!r}, which lowers rewards, and none counts here. Fix: leave "
                    "it out, or set algorithm.settings.reward_coef"
                )

    @property
    def teacher_source(self) -> TeacherSource | None:
        return TeacherSource(self.teacher, self.teacher_prompt)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"proximal"}

    @property
    def needs_rewards(self) -> bool:
        return self.reward_coef > 0

    @property
    def compares_groups(self) -> bool:
        return False

    def assign_credit(self, batch: Batch) -> dict[str, float]:
        metrics, weight = super().assign_credit(batch), batch.entries.weight
        if (trained := weight > 0).any():
            kl = estimate_kl(batch)[trained]
            metrics["distill/kl/mean"] = float(np.average(kl, weights=weight[trained]))
            metrics |= {"distill/kl/max": float(kl.max()), "distill/kl/min": float(kl.min())}
        return metrics

    def compute_advantages(self, batch: Batch, rewards: Rewards) -> tuple[list[str | None], dict[str, float]]:
        entries = batch.entries
        entries.advantage[:] = 0.0
        if self.reward_coef:
            super().compute_advantages(batch, rewards)
            entries.advantage *= self.reward_coef
        entries.advantage -= discount(batch, estimate_kl(batch), self.kl_discount)
        return [None] * len(batch.turns), {}  # also a group whose members all got the same teaches something


def estimate_kl(batch: Batch) -> Floats:
    """How much likelier the student finds each token than the teacher does; 0 where nothing is trained, and the teacher
    may not have been asked."""
    entries, asked = batch.entries, batch.alive()
    for name, column in (("proximal", entries.proximal), ("teacher", entries.teacher)):
        missing = np.flatnonzero(asked & ~np.isfinite(column))
        assert not len(missing), f"turn {batch.turns[int(entries.turn[missing[0]])].id} has no {name} logprobs"
    return np.where(asked, entries.proximal - entries.teacher, 0.0)


def discount(batch: Batch, values: Floats, factor: float) -> Floats:
    """Each token's value and those of later tokens of its turn, by `factor` less for each token between."""
    found = values.copy()
    if factor:
        for t in range(len(batch.turns)):
            rows = batch.rows(t)
            for row, following in zip(rows[-2::-1], rows[:0:-1], strict=True):
                found[row] += factor * found[following]
    return found
