"""Direct Preference Optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) on pairs of stored rollouts.

Of two rollouts of one task the one that got more is preferred. With s(y) the sum of logp - ref over what the trained
agents said in y, ref being the model as the run began, the loss of a pair and its gradient are

    -log sigmoid(beta m)                    m = s(chosen) - s(rejected)
    -beta sigmoid(-beta m) d m              d m = sum of d logp over chosen - the same over rejected

A step makes one optimizer step, at whose weights `score` has read every logprob: there the gradient is exactly that of
tokens weighted by +-beta sigmoid(-beta m), which needs no pair to be in one micro-batch. Several optimizer steps per
step would begin from weights that m is not of, and are refused.

The loss falls as well where both become unlikelier, the worse one faster, and then a policy may end up saying neither.
`sft_coef` holds the better one: it adds its negative log-likelihood, the mean over its tokens (RPO, Pang et al. 2024,
https://arxiv.org/abs/2404.19733).

A rollout is one answer, however many turns it has. Left out: the other losses of this family (IPO, KTO, ORPO).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from strop.algorithms.base import EntryTensors, Tensor
from strop.algorithms.offline import Candidate, Item, Offline, Positive, measure_reward, skip_unweighted
from strop.config import LearnerConfig, PolicyConfig
from strop.errors import ConfigError
from strop.trajectory import Batch


class DPO(Offline):
    """Direct Preference Optimization: of two stored rollouts of a task, the better one becomes likelier."""

    beta: Annotated[
        Positive, Meta(description="how strongly the policy is held to the model that the run began with")
    ] = 0.1
    sft_coef: Annotated[
        float, Meta(ge=0, description="weight of the better rollout's negative log-likelihood beside the preference")
    ] = 0.0
    pairs: Annotated[
        Literal["best_worst", "all"],
        Meta(description="which rollouts of a group are compared: the best with the worst, or all that differ"),
    ] = "best_worst"
    margin: Annotated[
        float, Meta(ge=0, description="smallest difference between the rewards of two that are compared")
    ] = 0.0

    item_size = 2

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"proximal", "ref"})

    def prepare(self, learner: LearnerConfig, policy: PolicyConfig) -> None:
        if learner.minibatches > 1:
            raise ConfigError(
                f"learner.minibatches is {learner.minibatches}, and dpo makes one optimizer step per step. Fix: leave "
                "it out, and set algorithm.settings.batch_size lower for more steps"
            )

    # -- data ----------------------------------------------------------------------------------------------------------

    def choose(self, candidates: Sequence[Candidate]) -> tuple[list[Item], Counter[str]]:
        left, groups = Counter[str](), defaultdict[str, list[int]](list)
        for i, one in enumerate(candidates):
            if one.reward is None:
                left["no_reward"] += 1
            else:
                groups[one.key].append(i)
        items: list[Item] = []
        seen: set[tuple[bytes, bytes]] = set()
        for members in groups.values():
            taken, repeated, equal = set[int](), set[int](), set[int]()
            for better, worse in self._compare(candidates, members):
                tokens = candidates[better].tokens, candidates[worse].tokens
                if tokens[0] == tokens[1]:  # nothing could make one of them likelier than the other
                    equal |= {better, worse}
                elif self.dedupe and tokens in seen:
                    repeated |= {better, worse}
                else:
                    seen.add(tokens)
                    items.append((better, worse))
                    taken |= {better, worse}
            left["duplicate"] += len(repeated - taken)
            left["equal_pair"] += len(equal - taken - repeated)
            left["no_pair"] += len(members) - len(taken | repeated | equal)
        return items, +left

    def _compare(self, candidates: Sequence[Candidate], members: Sequence[int]) -> list[tuple[int, int]]:
        """The pairs of a group, the better one first."""
        ranked = sorted(members, key=lambda i: -(candidates[i].reward or 0.0))
        pairs = [(ranked[0], ranked[-1])] if self.pairs == "best_worst" else combinations(ranked, 2)
        differences = {
            pair: (candidates[pair[0]].reward or 0.0) - (candidates[pair[1]].reward or 0.0) for pair in pairs
        }
        return [pair for pair, difference in differences.items() if difference > 0 and difference >= self.margin]

    # -- loss ----------------------------------------------------------------------------------------------------------

    def assign_credit(self, batch: Batch) -> dict[str, float]:
        skip_unweighted(batch)
        entries, pairs = batch.entries, self._find_pairs(batch)
        alive, shares = batch.alive(), batch.shares()
        if not pairs:
            return batch.counts()
        log_ratios = np.where(alive, shares * (entries.proximal - entries.ref), 0.0)
        sums = np.bincount(entries.rollout, log_ratios, minlength=len(batch.samples))
        better, worse = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
        margins = self.beta * (sums[better] - sums[worse])
        scale = self.beta * np.exp(-np.logaddexp(0.0, margins))  # beta sigmoid(-margin)
        tokens = np.bincount(entries.rollout, np.where(alive, shares, 0.0), minlength=len(batch.samples))
        signed = np.zeros(len(batch.samples))
        signed[better], signed[worse] = scale + self.sft_coef / tokens[better], -scale
        entries.advantage[:] = np.where(alive, signed[entries.rollout], 0.0)
        entries.weight[:] = np.where(alive, shares / len(pairs), 0.0)
        return {
            "actor/dpo_loss": float(np.logaddexp(0.0, -margins).mean()),
            "actor/dpo_accuracy": float((margins > 0).mean()),
            "actor/dpo_margin": float(margins.mean()),
            **batch.counts(),
        }

    def _find_pairs(self, batch: Batch) -> list[tuple[int, int]]:
        """The better and the worse sample of every group. One whose other carries no loss is dropped as well."""
        pairs: list[tuple[int, int]] = []
        for g in range(len(batch.groups)):
            members = [int(s) for s in np.flatnonzero(batch.group == g)]
            left = [s for s in members if batch.samples[s].rollout.id not in batch.dropped]
            rewards = {s: self._measure(batch, s) for s in left}
            if len(left) == len(members) == 2 and None not in rewards.values():
                worse, better = sorted(left, key=lambda s: rewards[s] or 0.0)
                pairs.append((better, worse))
            else:
                for s in left:
                    batch.drop(s, "no_pair")
        return pairs

    def _measure(self, batch: Batch, s: int) -> float | None:
        sample = batch.samples[s]
        return measure_reward(sample.rollout, sample.turns, self.rewards, batch.agents.__contains__)

    def compute_loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: EntryTensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -entries.advantage * logp, {}
