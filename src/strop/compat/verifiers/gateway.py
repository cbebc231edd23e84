"""Where verifiers' own client finds the model, and its scores as rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.agent.llm import LLM
from strop.types import Reward

TOTAL = "reward"
NO_KEY = "STROP_NO_KEY"
"""A variable that is not set: the key is in the address."""

TRY = "Fix: see whether verifiers' own `vf-eval` runs it"
"""Said of a rollout that ended with an error of verifiers'."""


def write_url(llm: LLM) -> str:
    """The gateway with the attempt's key in the address: verifiers takes keys from variables only, and rollouts of one
    process have a key each. Who speaks is said in the header x-strop-agent."""
    root, _, _ = llm.base_url.rpartition("/r/")
    return f"{root}/k/{llm.api_key}/v1"


def read_scores(total: float, scores: Mapping[str, Any], agent: str | None = None) -> list[Reward]:
    """The total, and every score by its name; one that is called as the total is gets `_function` behind it. Only the
    total counts by default: it has the weighted scores in it.

    >>> read_scores(1.5, {"exact": 1, "reward": 0.5})  # doctest: +NORMALIZE_WHITESPACE
    [Reward(name='reward', value=1.5, turn=None, agent=None), Reward(name='exact', value=1.0, turn=None, agent=None),
     Reward(name='reward_function', value=0.5, turn=None, agent=None)]
    """
    named = {f"{name}_function" if name == TOTAL else name: value for name, value in scores.items()}
    told = {TOTAL: total, **{name: value for name, value in named.items() if value is not None}}
    return [Reward(name=name, value=float(value), agent=agent) for name, value in told.items()]
