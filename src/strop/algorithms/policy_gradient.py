"""What all algorithms that follow the policy gradient share; each brings its own advantages.

credit    rewards (less penalties) → advantages → filters → weights
loss      policy loss × correction + KL − entropy, per entry

rewards       rewards.py      a total per rollout, what turns and agents got of their own
penalties     filters.py, kl.py   subtracted from the rewards before any baseline
advantages    the algorithm's file, with credit.py
filters       filters.py      after the baseline, so that nothing that is dropped biases it
weights       aggregate.py    every normaliser, over the whole batch: also over groups whose members all got the same
policy loss   losses.py
correction    correction.py   importance-sampling correction, for tokens that other weights sampled
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from strop.algorithms.aggregate import Aggregation, aggregate
from strop.algorithms.base import Algorithm, EntryTensors, Tensor
from strop.algorithms.correction import Correction, correct
from strop.algorithms.filters import Overlong, filter_batch, find_overlong, leave_out
from strop.algorithms.kl import AdaptiveCoefficient, Estimator, estimate, penalise_rewards
from strop.algorithms.losses import Loss, compute_policy_loss
from strop.algorithms.metrics import summarize
from strop.algorithms.rewards import Rewards, count_unused
from strop.config import LearnerConfig, PolicyConfig
from strop.trajectory import Batch

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NoSignal = Literal["zero_variance", "group_of_one"]
"""Why a group teaches nothing: its members all got the same, or there is one only."""


class PolicyGradient(Algorithm):
    """Algorithms add settings of their own, and defaults."""

    loss: Annotated[Loss, Meta(description="policy loss: PPO's clipped surrogate and others")] = "dual_clip"
    clip: Annotated[
        Positive, Meta(description="clip range: probability ratios are clipped to 1 - clip ... 1 + clip")
    ] = 0.2
    clip_high: Annotated[
        Positive | None, Meta(description="upper clip range (clip-higher); default: the same as clip")
    ] = None
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)],
        Meta(description="with loss = dual_clip: upper bound of the ratio where the advantage is negative"),
    ] = 3.0
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
    filter_groups: Annotated[
        tuple[NoSignal, ...],
        Meta(
            description="groups left out of the loss and its denominators: zero_variance (equal rewards), group_of_one"
        ),
    ] = ("group_of_one",)
    kl: Annotated[
        Literal["none", "loss", "reward"],
        Meta(description="KL penalty to the reference policy: in the loss or in the reward"),
    ] = "none"
    kl_estimator: Annotated[
        Estimator | None,
        Meta(description="KL estimator; default: low_var in the loss, k1 in the reward"),
    ] = None
    kl_coef: Annotated[float, Meta(ge=0, description="KL coefficient: weight of the penalty")] = 0.001
    kl_target: Annotated[
        Positive | None,
        Meta(description="adaptive KL, with kl = reward: the KL that kl_coef is steered to; default: it is fixed"),
    ] = None
    kl_horizon: Annotated[Count, Meta(description="adaptive KL: rollouts over which kl_coef moves")] = 10000
    entropy_coef: Annotated[float, Meta(ge=0, description="entropy coefficient: weight of an entropy bonus")] = 0.0
    correction: Annotated[
        Correction,
        Meta(
            description="importance-sampling correction: how tokens that the learner finds more or less likely than "
            "the engine did are weighted"
        ),
    ] = "none"
    correction_low: Annotated[
        float, Meta(ge=0, description="smallest importance ratio that icepop and geometric keep")
    ] = 0.5
    correction_high: Annotated[
        Positive,
        Meta(description="largest importance ratio: truncated to (token, sequence) or kept (icepop, geometric)"),
    ] = 2.0
    overlong: Annotated[
        Overlong,
        Meta(description="answers truncated at max_tokens: keep them, drop the rollout, mask the turn, or penalise"),
    ] = "keep"
    overlong_penalty: Annotated[
        float, Meta(ge=0, description="with overlong = penalise: subtracted from the reward")
    ] = 1.0
    drop_malformed: Annotated[bool, Meta(description="leave out turns with malformed tool calls")] = False
    max_turns: Annotated[
        Count | None, Meta(description="trained turns per rollout at most, chosen at random; default: all")
    ] = None

    def __post_init__(self) -> None:
        self._updates = 1
        self._kl = AdaptiveCoefficient(self.kl_coef, self.kl_target, self.kl_horizon)
        self._estimator: Estimator = self.kl_estimator or ("k1" if self.kl == "reward" else "low_var")

    def prepare(self, learner: LearnerConfig, policy: PolicyConfig) -> None:
        self._updates = learner.minibatches
        self.horizon = self.horizon or policy.train.max_tokens

    @property
    def needs(self) -> frozenset[str]:
        # With one optimizer step the proximal policy is the policy itself; from the second on it must be remembered.
        proximal = {"proximal"} if self._updates > 1 or self.kl == "reward" else set[str]()
        return frozenset(proximal | ({"ref"} if self.kl != "none" else set()))

    def resume(self, metrics: Mapping[str, float]) -> None:
        self._kl.coef = metrics.get("actor/kl_coef", self._kl.coef)

    # -- credit --------------------------------------------------------------------------------------------------------

    def assign_credit(self, batch: Batch) -> dict[str, float]:
        entries = batch.entries
        rewards = Rewards.of(batch, self.rewards, required=self.needs_rewards)
        got = (rewards.totals + rewards.agents.sum(axis=1))[batch.counted]
        metrics = summarize("critic/rewards", got[~np.isnan(got)])
        if self.overlong == "penalise":
            rewards.totals -= self.overlong_penalty * find_overlong(batch)
        if self.kl == "reward":
            metrics["actor/reward_kl_penalty"] = distance = penalise_rewards(
                batch, rewards, self._estimator, self._kl.coef
            )
            if entries.trainable.any():
                self._kl.follow(distance, rollouts=len(batch.samples))
            metrics["actor/kl_coef"] = self._kl.coef
        nothing, more = self.compute_advantages(batch, rewards)
        leave_out(batch, [why if why in self.filter_groups else None for why in nothing])
        filter_batch(batch, overlong=self.overlong, malformed=self.drop_malformed, max_turns=self.max_turns)
        assert self.horizon is not None, "prepare says how many tokens a turn may have"
        aggregate(batch, self.aggregation, self.horizon)
        if not self.is_regularised:
            # They count in the denominators; their loss is 0 whatever the weights, so nobody need compute it.
            leave_out(batch, [why if why == "zero_variance" else None for why in nothing])
            entries.weight[~batch.alive()] = 0.0
        trained = entries.weight > 0
        entries.advantage[~trained] = 0.0
        return {
            **metrics,
            **more,
            **summarize("critic/advantages", entries.advantage[trained]),
            **batch.counts(),
            **count_unused(batch, self.rewards),
        }

    @property
    def is_regularised(self) -> bool:
        """Whether a token carries loss even where its advantage is 0."""
        return self.kl == "loss" or self.entropy_coef > 0

    @abstractmethod
    def compute_advantages(self, batch: Batch, rewards: Rewards) -> tuple[list[str | None], dict[str, float]]:
        """Fill the entries' advantage (and ret, for a critic); return for each turn the reason it teaches nothing
        (`NoSignal`), or None, and metrics.

        Every entry of a counted sample gets one, whether it is trainable or not; others stay 0.
        """

    # -- loss ----------------------------------------------------------------------------------------------------------

    def compute_loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: EntryTensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Where proximal is NaN nothing was scored: this is the first optimizer step since the weights that the step
        # began with, and the proximal policy is the policy itself.
        proximal = entries.proximal.where(~entries.proximal.isnan(), logp.detach())
        high = self.clip_high or self.clip
        loss, metrics = compute_policy_loss(
            self.loss, logp, proximal, entries, low=self.clip, high=high, dual=self.dual_clip
        )
        if self.correction != "none":
            factor, more = correct(
                self.correction, proximal, entries, low=self.correction_low, high=self.correction_high
            )
            loss = loss * factor
            metrics |= more | {"actor/pg_loss": loss.detach()}
        if self.kl == "loss":
            distance = estimate(self._estimator, logp, entries.ref)
            loss = loss + self.kl_coef * distance
            metrics["actor/kl_loss"] = distance.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        return loss, metrics
