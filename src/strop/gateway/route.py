"""Who answers an agent: which policy, by the model an agent asks for, by the agent's name, or the one for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from strop.engines.base import Engine
from strop.gateway.dialects.base import Refused
from strop.gateway.render import Renderer
from strop.gateway.session import History
from strop.types import Rollout, Sampling

ANY = "*"
"""The route for agents that have none of their own."""


class PolicyRoute(Struct, frozen=True, kw_only=True):
    """A policy, the engine that serves it, its renderer, and how a rollout samples.

    `sampling_for` decides by rollout (training, evaluation, greedy evaluation); its settings win over the request's.
    `history`: what the model is shown of what it said before, see `strop.gateway.session`.
    """

    policy: str
    model: str
    engine: Engine
    renderer: Renderer
    sampling_for: Callable[[Rollout], Sampling]
    history: History = "sampled"


class Routes:
    """`agents` says who answers for which agent name, "*" for all others; `models` who answers when an agent asks for a
    certain model, whatever its name."""

    def __init__(self, agents: Mapping[str, PolicyRoute], models: Mapping[str, PolicyRoute] | None = None) -> None:
        self.agents, self.models = agents, models or {}

    def find(self, agent: str, model: str | None) -> PolicyRoute:
        route = self.models.get(model or "") or self.agents.get(agent) or self.agents.get(ANY)
        if route is None:
            known = ", ".join(sorted({*self.agents, *self.models}))
            raise Refused(f"no model answers for agent {agent!r}; known: {known}", status=404, code="model_not_found")
        return route
