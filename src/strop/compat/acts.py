"""The tool `act`, which a model calls instead of saying its action in words."""

from __future__ import annotations

from typing import Any

from strop.agent.episode import Action
from strop.agent.tool import Tool

ACT = "act"


def make_act(parameters: dict[str, Any]) -> Tool:
    """The tool, whose arguments are `parameters`."""
    return Tool(_take, name=ACT, description="Act in the environment.", parameters=parameters)


def find_act(action: Action) -> dict[str, Any]:
    """What the one call of it was given. Raises `ValueError`, which is told to the model."""
    acts = [call for call in action.calls if call.name == ACT]
    if len(acts) != 1:
        raise ValueError(f"there are {len(acts)} calls of {ACT}: give one")
    return acts[0].given


def _take(**action: Any) -> str:
    """What the tool says; the environment acts once it sees the call."""
    return "ok"
