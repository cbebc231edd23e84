"""Supervised fine-tuning on stored rollouts and transcripts: imitation, of all of them or of the best.

The loss of a token is its negative log-likelihood; prompts and what the environment said carry none. Which rollouts are
imitated, and how much each counts:

    min_reward, top           rejection sampling: only rollouts that got so much, the best so many of a task (RFT, Yuan
                              et al. 2023, https://arxiv.org/abs/2308.01825)
    weighting = "reward"      reward-weighted: a rollout counts as much as it got; one that got 0 or less is left out
                              (Peters and Schaal 2007)
    weighting = "exponential" advantage-weighted: exp(reward / beta) (Peng et al. 2019,
                              https://arxiv.org/abs/1910.00177, with the mean of the step as the baseline)

Weights have mean 1 over the rollouts of a step that carry loss, so that a baseline changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from strop.algorithms.aggregate import Aggregation, aggregate
from strop.algorithms.base import EntryTensors, Tensor
from strop.algorithms.offline import Candidate, Count, Item, Offline, Positive, measure_reward, skip_unweighted
from strop.config import LearnerConfig, PolicyConfig
from strop.trajectory import Batch
from strop.trajectory.batch import Floats

Weighting = Literal["none", "reward", "exponential"]


class SFT(Offline):
    """Supervised fine-tuning: the model learns to say what was said in stored rollouts and transcripts."""

    min_reward: Annotated[
        float | None, Meta(description="rejection sampling: only rollouts whose total reward is at least this")
    ] = None
    top: Annotated[
        Count | None, Meta(description="rejection sampling: only the best so many rollouts of each task")
    ] = None
    weighting: Annotated[
        Weighting,
        Meta(description="what a rollout counts: all the same (none), its reward, or exp(reward / beta)"),
    ] = "none"
    beta: Annotated[
        Positive,
        Meta(description="with weighting = exponential: the larger, the more alike rollouts count"),
    ] = 1.0
    aggregation: Annotated[
        Aggregation, Meta(description="loss aggregation: how the loss is averaged over tokens, turns and rollouts")
    ] = "token-mean"
    horizon: Annotated[
        Count | None,
        Meta(
            description="with aggregation = ...-norm: the constant number of tokens that sums are divided by; default: "
            "policy.train.max_tokens"
        ),
    ] = None

    def prepare(self, learner: LearnerConfig, policy: PolicyConfig) -> None:
        self.horizon = self.horizon or policy.train.max_tokens

    # -- data ----------------------------------------------------------------------------------------------------------

    def choose(self, candidates: Sequence[Candidate]) -> tuple[list[Item], Counter[str]]:
        left = Counter[str]()
        needs_reward = self.min_reward is not None or self.top is not None or self.weighting != "none"
        seen: set[bytes] = set()
        tasks: dict[str, int] = defaultdict(int)
        taken: list[int] = []
        for i in sorted(range(len(candidates)), key=lambda i: -_or_lowest(candidates[i].reward)):  # the best first
            one = candidates[i]
            if one.reward is None and needs_reward:
                left["no_reward"] += 1
            elif self.min_reward is not None and _or_lowest(one.reward) < self.min_reward:
                left["min_reward"] += 1
            elif self.weighting == "reward" and _or_lowest(one.reward) <= 0:
                left["no_weight"] += 1
            elif self.dedupe and one.tokens in seen:
                left["duplicate"] += 1
            elif self.top is not None and tasks[one.task] >= self.top:
                left["top"] += 1
            else:
                seen.add(one.tokens)
                tasks[one.task] += 1
                taken.append(i)
        return [(i,) for i in sorted(taken)], left

    # -- loss ----------------------------------------------------------------------------------------------------------

    def assign_credit(self, batch: Batch) -> dict[str, float]:
        skip_unweighted(batch)
        counts = self._weigh(batch)
        assert self.horizon is not None, "prepare says how many tokens a turn may have"
        aggregate(batch, self.aggregation, self.horizon)
        entries = batch.entries
        trained = np.unique(entries.rollout[entries.weight > 0])
        if len(trained):
            entries.weight *= (counts / counts[trained].mean())[entries.rollout]
        return batch.counts()

    def _weigh(self, batch: Batch) -> Floats:
        """What each sample counts. One that would count nothing is dropped, and not in the denominators either."""
        counts = np.ones(len(batch.samples))
        if self.weighting == "none":
            return counts
        for s, sample in enumerate(batch.samples):
            reward = measure_reward(sample.rollout, sample.turns, self.rewards, batch.agents.__contains__)
            if reward is None:
                batch.drop(s, "no_reward")
            elif self.weighting == "reward" and reward <= 0:
                batch.drop(s, "no_weight")
            else:
                counts[s] = reward
        kept = np.array([sample.rollout.id not in batch.dropped for sample in batch.samples], bool)
        if self.weighting == "exponential" and kept.any():
            counts[kept] = np.exp((counts[kept] - counts[kept].max()) / self.beta)
        return counts

    def compute_loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: EntryTensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -logp, {"actor/sft_loss": -logp.detach()}


def _or_lowest(reward: float | None) -> float:
    return float("-inf") if reward is None else reward
