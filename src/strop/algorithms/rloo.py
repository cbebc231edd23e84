"""REINFORCE, leave one out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740).

A rollout's advantage is its total minus the mean of the others in its group: a baseline that does not depend on the
rollout it is taken off. Everything else is as in GRPO, without dividing by a standard deviation.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from strop.algorithms.grpo import GRPO


class RLOO(GRPO):
    """REINFORCE with the mean of the other members of the group as baseline."""

    normalize_std: Annotated[bool, Meta(description="divide advantages by the standard deviation of the group")] = False

    leave_one_out = True
