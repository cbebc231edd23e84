"""Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783): GRPO without its two biases.

Advantages are not divided by the group's standard deviation, which favours tasks that are too easy or too hard, and
tokens are not divided by the length of their answer, which favours long wrong answers: the loss is the mean over
rollouts of the sum over tokens, divided by a length that is the same for all (`horizon`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from strop.algorithms.aggregate import Aggregation
from strop.algorithms.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO without dividing by the standard deviation or by the length of answers."""

    normalize_std: Annotated[bool, Meta(description="divide advantages by the standard deviation of the group")] = False
    aggregation: Annotated[
        Aggregation, Meta(description="loss aggregation: how the loss is averaged over tokens, turns and rollouts")
    ] = "rollout-sum-norm"
