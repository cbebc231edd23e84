"""Agents written for Agent Lightning 0.3, with one line changed:

    import strop.compat.agentlightning as agl

    strop train calc_agent.py:calc_agent --tasks tasks.jsonl

`agents` has LitAgent and @rollout, `resources` what they are handed, `emit` what they say, `trainer` has Trainer and
VERL. `installed` answers `import agentlightning` itself, `launch` runs the agent classes of 1.0. Left out: stores,
tracers, runners, adapters and hooks, whose work the gateway and the run do: `missing` says so once they are used.
"""

from typing import Any

from strop.compat.agentlightning.agents import AgentFunction, LitAgent, rollout
from strop.compat.agentlightning.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    reward,
)
from strop.compat.agentlightning.launch import launch
from strop.compat.agentlightning.missing import find_missing
from strop.compat.agentlightning.resources import (
    AttemptedRollout,
    Dataset,
    NamedResources,
    PromptTemplate,
    ResourceUnion,
    setup_logging,
)
from strop.compat.agentlightning.resources import ModelEndpoint as LLM
from strop.compat.agentlightning.trainer import VERL, Trainer

Rollout = AttemptedRollout
__all__ = [
    "LLM",
    "VERL",
    "AgentFunction",
    "AttemptedRollout",
    "Dataset",
    "LitAgent",
    "NamedResources",
    "PromptTemplate",
    "ResourceUnion",
    "Rollout",
    "Trainer",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "launch",
    "reward",
    "rollout",
    "setup_logging",
]


def __getattr__(name: str) -> Any:
    return find_missing(name)
