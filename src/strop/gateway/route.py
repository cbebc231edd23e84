"""Who answers an agent: which policy or outside model, by the model it asks for, by its name, or the one for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.config import OutsideConfig
from strop.engines.base import Engine
from strop.errors import ConfigError
from strop.gateway.budget import recall
from strop.gateway.contexts import History
from strop.gateway.dialects.base import ApiError, Json, ModelRequest
from strop.gateway.jinja import EFFORT, THINKING
from strop.gateway.outside import OutsideRoute
from strop.gateway.replicas import Replicas
from strop.gateway.template import Renderer
from strop.store.base import Store
from strop.types import Rollout, Sampling

ANY = "*"
WILD = re.compile(r"[*?\[]")
"""The route for agents that have none of their own."""


class PolicyRoute(Struct, frozen=True, kw_only=True):
    """A policy, the engine that serves it, its renderer, and how a rollout samples.

    `sampling_for` decides by rollout (training, evaluation, greedy evaluation); its settings win over the request's.
    `history`: what the model is shown of what it said before, see `strop.gateway.contexts`.
    """

    policy: str
    model: str
    engine: Engine
    renderer: Renderer
    sampling_for: Callable[[Rollout], Sampling]
    history: History = "sampled"

    def of(self, rollout: Rollout) -> PolicyRoute:
        """The same for one rollout, where several engines serve the policy."""
        return replace(self, engine=self.engine.of(rollout.id)) if isinstance(self.engine, Replicas) else self

    def asked_by(self, request: ModelRequest) -> PolicyRoute:
        """The same with the chat template's variables as a request wants them: the request goes before the policy, and
        what it says by name before what follows from how much it wants the model to think. Raises `ApiError`, also for
        tools that would reach nobody."""
        lost = self.renderer.tooling.lost
        if lost and (request.tools or any(m["role"] == "tool" or m.get("tool_calls") for m in request.messages)):
            raise ApiError(lost, param="tools", code="unsupported_parameter")
        reads, given = self.renderer.reads, request.variables
        if why := self.renderer.explain_unread(given):
            raise ApiError(f"chat_template_kwargs: {why}", param="chat_template_kwargs", code="unsupported_value")
        thinking = request.thinking
        if thinking is None and request.effort is not None:
            thinking = request.effort != "none"
        switched: Json = {} if thinking is None else dict.fromkeys(reads & {*THINKING}, thinking)
        if request.effort is not None and not (switched and request.effort == "none"):
            switched |= dict.fromkeys(reads & {*EFFORT}, request.effort)
        return replace(self, renderer=self.renderer.with_variables(switched | given))


Route = PolicyRoute | OutsideRoute


class _Asks(Struct):
    model: Any = None


class Routes:
    """`agents` says who answers for which agent: by its name, or else by the first pattern that it matches, "*" for all
    others. `models` says who answers when an agent asks for a certain model, whatever its name."""

    def __init__(self, agents: Mapping[str, Route], models: Mapping[str, Route] | None = None) -> None:
        self.agents, self.models = agents, models or {}
        self._patterns = sorted((name for name in agents if WILD.search(name)), key=lambda name: name == ANY)
        every = [*self.agents.values(), *self.models.values()]
        self._outside = [route for route in every if isinstance(route, OutsideRoute)]

    @classmethod
    def of(
        cls,
        policy: PolicyRoute,
        outside: Mapping[str, OutsideConfig],
        policies: Mapping[str, PolicyRoute] | None = None,
    ) -> Routes:
        """A policy for all agents but those that outside models or other `policies`, by names or patterns of agents,
        answer for. Raises `ConfigError`."""
        agents: dict[str, Route] = {}
        models: dict[str, Route] = {}
        for name, config in outside.items():
            route = OutsideRoute.of(name, config)
            for place, names in ((agents, config.agents), (models, config.models)):
                for taken in (taken for taken in names if taken in place):
                    raise ConfigError(f"gateway.outside.{name}: another outside model has {taken!r} too: leave one out")
                place.update(dict.fromkeys(names, route))
        others = policies or {}
        several = len({route.policy for route in others.values()}) > 1
        for taken in (taken for taken in others if several and taken in agents):
            raise ConfigError(f"gateway.outside: a policy answers for {taken!r} too: leave one out")
        return cls({ANY: policy, **others, **agents}, models)

    def any(self, agent: str, model: str | None) -> Route:
        route = self.models.get(model or "") or self.agents.get(agent) or self._match(agent)
        if route is None:
            known = ", ".join(sorted({*self.agents, *self.models}))
            raise ApiError(f"no model answers for agent {agent!r}; known: {known}", status=404, code="model_not_found")
        return route

    def _match(self, agent: str) -> Route | None:
        return next((self.agents[pattern] for pattern in self._patterns if fnmatchcase(agent, pattern)), None)

    def find(self, agent: str, model: str | None) -> PolicyRoute:
        """The policy that answers."""
        route = self.any(agent, model)
        if isinstance(route, OutsideRoute):
            message = f"{route.policy} is an outside model, and only its provider can answer this"
            raise ApiError(message, status=404, code="model_not_found")
        return route

    def outside(self, agent: str, body: bytes) -> OutsideRoute | None:
        """The outside model that answers a request, if one does."""
        if not self._outside:
            return None
        try:
            model = msgspec.json.decode(body, type=_Asks).model
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            model = None
        route = self.any(agent, model if isinstance(model, str) else None)
        return route if isinstance(route, OutsideRoute) else None

    async def recall(self, store: Store) -> None:
        """What a run has spent on outside models before it was opened again."""
        await recall(store, {route.policy: route.budget for route in self._outside})

    async def close(self) -> None:
        for route in self._outside:
            await route.client.close()
