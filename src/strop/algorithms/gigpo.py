"""Group-in-Group Policy Optimization (Feng et al. 2025, https://arxiv.org/abs/2505.10978).

To GRPO's advantage of the rollout is added, `step_weight` times, one of the turn: its return (reward-to-go) compared
with those of other rollouts of the group whose agent stood in the same state. States are the same where they are token
for token:

    anchor = "prompt"        the whole prompt: the same history
    anchor = "observation"   what is new in it since the agent's turn before: the same place, however it got there

A rollout counts once per state, however often it came back to it. A state that only one rollout saw adds nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from hashlib import blake2b
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from strop.algorithms.credit import Scores, compare, compute_rewards_to_go, number_keys
from strop.algorithms.grpo import GRPO
from strop.algorithms.policy_gradient import Share
from strop.algorithms.rewards import Rewards, cap_failed, find_failed
from strop.algorithms.timeline import Timeline, build_timelines
from strop.trajectory import Batch
from strop.trajectory.batch import Floats, Ints
from strop.trajectory.token_tree import count_shared
from strop.types import Turn

Anchor = Literal["prompt", "observation"]


class GiGPO(GRPO):
    """GRPO with a second comparison, among turns of the group that saw the same state."""

    anchor: Annotated[Anchor, Meta(description="state grouping: what makes two states the same")] = "prompt"
    step_weight: Annotated[
        float, Meta(ge=0, description="weight of the step-level advantage, among turns in one state")
    ] = 1.0
    discount: Annotated[Share, Meta(description="discount factor (gamma) per turn, in the return of a turn")] = 0.95

    def extra(self, batch: Batch, rewards: Rewards) -> Floats:
        return super().extra(batch, rewards) + self.step_weight * self._steps(batch, rewards)

    def _steps(self, batch: Batch, rewards: Rewards) -> Floats:
        """How each turn compares with the others in its state, [turns]."""
        returns = compute_rewards_to_go(batch, rewards, self.discount, self.terminal_share)
        paths = {turn.id: path for turn, path in zip(batch.turns, batch.paths, strict=True)}
        seen = [
            (timeline, turn, state)
            for timeline in build_timelines(batch)
            for turn, state in _states(timeline, self.anchor, paths)
        ]
        index = {turn.id: k for k, (_, turn, _) in enumerate(seen)}
        keys: list[Hashable] = [
            (int(batch.group[timeline.sample]), timeline.agent, state) for timeline, _, state in seen
        ]
        value, key = np.array([returns[turn.id] for _, turn, _ in seen], np.float64), number_keys(keys)
        sample = np.array([timeline.sample for timeline, _, _ in seen], np.int64)
        steps = Scores(
            value=cap_failed(value, value, key, find_failed(batch)[sample]),
            sample=sample,
            key=key,
            share=np.array([1.0 / turn.choices for _, turn, _ in seen], np.float64),
            turn=np.array([index.get(turn.id, -1) for turn in batch.turns], np.int64),
        )
        return np.append(compare(steps, std=self.normalize_std)[0], 0.0)[steps.turn]


def _states(timeline: Timeline, anchor: Anchor, paths: Mapping[str, Ints]) -> Iterator[tuple[Turn, bytes]]:
    """The turns of a timeline, each with a digest of the ids that make its state. Rollouts over budget have no path."""
    before: list[Ints] = []
    for moment in timeline.moments:
        here = [paths[turn.id] if turn.id in paths else np.array(turn.ids, np.int64) for turn in moment]
        for turn, path in zip(moment, here, strict=True):
            prompt = path[: len(turn.prompt_ids)]
            known = (
                max((count_shared(prompt, earlier) for earlier in before), default=0) if anchor == "observation" else 0
            )
            yield turn, blake2b(prompt[known:].tobytes(), digest_size=16).digest()
        before = here
