"""Who answers an agent: which policy or outside model, by the model it asks for, by its name, or the one for all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
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
from strop.gateway.draw import draw_number
from strop.gateway.jinja import EFFORT, THINKING
from strop.gateway.outside import OutsideRoute
from strop.gateway.template import Renderer
from strop.store.base import Store
from strop.types import Rollout, Sampling

ANY = "*"
"""The route for agents that have none of their own."""
WILD = re.compile(r"[*?\[]")
CLAIM = "put it into policies.NAME.agents, or call a policy main, which takes all others"


class PolicyRoute(Struct, frozen=True, kw_only=True):
    """A policy, the engine that serves it, its renderer, and how a rollout samples.

    `sampling_for` decides by rollout (training, evaluation, greedy evaluation); its settings win over the request's.
    `history`: what the model is shown of what it said before, see `strop.gateway.contexts`. `most` tokens a sequence
    may have, where the engine, which others may share, takes more.
    """

    policy: str
    model: str
    engine: Engine
    renderer: Renderer
    sampling_for: Callable[[Rollout], Sampling]
    history: History = "sampled"
    most: int | None = None

    @property
    def context(self) -> int:
        """The most tokens (prompt and answer together) that a sequence of this policy may have."""
        return min(self.engine.context, self.most or self.engine.context)

    @property
    def holds_to_schemas(self) -> bool:
        """Whether the engine can, as it is now."""
        return self.engine.holds_to_schemas

    def of(self, rollout: Rollout) -> PolicyRoute:
        """The same for one rollout, where several engines serve the policy, or several of its versions are served."""
        engine = self.engine.of_rollout(rollout)
        return self if engine is self.engine else replace(self, engine=engine)

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
        renderer = self.renderer.with_variables(switched | given) if switched or given else self.renderer
        return self if renderer is self.renderer else replace(self, renderer=renderer)


Route = PolicyRoute | OutsideRoute


class Chance(Struct, frozen=True):
    """An outside model that answers for the agents of a pattern in some rollouts."""

    pattern: str
    route: OutsideRoute
    probability: float


class _Asks(Struct):
    model: Any = None


class Routes:
    """`agents` says who answers for which agent: by its name, or else by the first pattern that it matches, "*" for all
    others. `models` says who answers when an agent asks for a certain model, whatever its name. `chances` are outside
    models that answer for some agents in some rollouts, before all these."""

    def __init__(
        self, agents: Mapping[str, Route], models: Mapping[str, Route] | None = None, chances: Sequence[Chance] = ()
    ) -> None:
        self.agents, self.models, self._chances = agents, models or {}, chances
        self._patterns = sorted((name for name in agents if WILD.search(name)), key=lambda name: name == ANY)
        every = [*self.agents.values(), *self.models.values(), *(chance.route for chance in chances)]
        self._outside = [route for route in every if isinstance(route, OutsideRoute)]
        self.unclaimed = ""  # what was said of the first agent that nobody answers for
        self.missed = asyncio.Event()

    @classmethod
    def of(
        cls,
        policy: PolicyRoute | None,
        outside: Mapping[str, OutsideConfig],
        policies: Mapping[str, PolicyRoute] | None = None,
    ) -> Routes:
        """A policy for all agents but those that outside models or other `policies`, by names or patterns of agents,
        answer for; without one, others are refused. Raises `ConfigError`."""
        agents: dict[str, Route] = {}
        models: dict[str, Route] = {}
        chances: list[Chance] = []
        named = {route.policy for route in (policy, *(policies or {}).values()) if route is not None}
        for name, config in outside.items():
            if name in named:
                raise ConfigError(f"gateway.outside.{name}: a policy is called that too. Fix: call it something else")
            route = OutsideRoute.of(name, config)
            if config.probability < 1:
                chances += [Chance(pattern, route, config.probability) for pattern in config.agents]
            places = ((agents, config.agents), (models, config.models))
            for place, names in places if config.probability == 1 else places[1:]:
                for taken in (taken for taken in names if taken in place):
                    raise ConfigError(
                        f"gateway.outside.{name}: another outside model has {taken!r} too. Fix: leave one out"
                    )
                place.update(dict.fromkeys(names, route))
        _refuse_likely(chances)
        others = policies or {}
        for taken in (taken for taken in others if taken in agents):
            raise ConfigError(f"gateway.outside: a policy answers for {taken!r} too. Fix: leave one out")
        everybody: dict[str, Route] = {ANY: policy} if policy is not None else {}
        routes = cls({**everybody, **others, **agents}, models, chances)
        for chance in chances:
            if not WILD.search(chance.pattern) and not (
                chance.pattern in routes.agents or routes._match(chance.pattern)
            ):
                raise ConfigError(
                    f"gateway.outside.{chance.route.policy} answers for {chance.pattern!r} in some rollouts, and in "
                    f"others no policy does. Fix: {CLAIM}"
                )
        return routes

    def any(self, agent: str, model: str | None, rollout: Rollout | None = None) -> Route:
        route = (
            self.models.get(model or "") or self._draw(agent, rollout) or self.agents.get(agent) or self._match(agent)
        )
        if route is None:
            known = ", ".join(sorted({*self.agents, *self.models}))
            message = f"no policy answers for agent {agent!r}, only for {known}. Fix: {CLAIM}"
            self.unclaimed = self.unclaimed or message
            self.missed.set()
            raise ApiError(message, status=404, code="model_not_found")
        return route

    def _draw(self, agent: str, rollout: Rollout | None) -> Route | None:
        """The outside model that answers for an agent in this very rollout, if one does."""
        left = draw_number(rollout, agent) if rollout is not None and self._chances else 1.0
        for chance in self._chances:
            if fnmatchcase(agent, chance.pattern):
                if left < chance.probability:
                    return chance.route
                left -= chance.probability
        return None

    def _match(self, agent: str) -> Route | None:
        return next((self.agents[pattern] for pattern in self._patterns if fnmatchcase(agent, pattern)), None)

    def find(self, agent: str, model: str | None, rollout: Rollout | None = None) -> PolicyRoute:
        """The policy that answers."""
        route = self.any(agent, model, rollout)
        if isinstance(route, OutsideRoute):
            message = (
                f"{route.policy} is an outside model, and only its provider can answer this. Fix: ask the provider"
            )
            raise ApiError(message, status=404, code="model_not_found")
        return route

    def outside(self, agent: str, body: bytes, rollout: Rollout | None = None) -> OutsideRoute | None:
        """The outside model that answers a request, if one does."""
        if not self._outside:
            return None
        try:
            model = msgspec.json.decode(body, type=_Asks).model
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            model = None
        route = self.any(agent, model if isinstance(model, str) else None, rollout)
        return route if isinstance(route, OutsideRoute) else None

    async def recall(self, store: Store) -> None:
        """What a run has spent on outside models before it was opened again."""
        await recall(store, {route.policy: route.budget for route in self._outside})

    async def close(self) -> None:
        for route in self._outside:
            await route.client.close()


def _refuse_likely(chances: Sequence[Chance]) -> None:
    """Raises `ConfigError` where outside models would answer for the same agents more often than always."""
    for pattern in dict.fromkeys(chance.pattern for chance in chances):
        same = [chance for chance in chances if fnmatchcase(pattern, chance.pattern)]
        if sum(chance.probability for chance in same) > 1:
            names = " and ".join(chance.route.policy for chance in same)
            raise ConfigError(
                f"gateway.outside: the probabilities of {names} for {pattern!r} come to more than 1. Fix: lower them"
            )
