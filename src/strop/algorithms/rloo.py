"""REINFORCE, leave one out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740).

A rollout's advantage is its total minus the mean of the others in its group: a baseline that does not depend on the
rollout it is taken off. Everything else is as in GRPO, without dividing by a standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from strop.algorithms import grpo
from strop.algorithms.grpo import GRPO
from strop.config import LearnerConfig


class Settings(grpo.Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    normalize_std: Annotated[bool, Meta(description="divide advantages by the standard deviation of the like")] = False


class RLOO(GRPO):
    leave_one_out = True


def make(rewards: Mapping[str, float], settings: Settings, learner: LearnerConfig) -> RLOO:
    return RLOO(rewards, settings, learner)
