"""The gateway of a run: who answers agents, in this process or in several (gateway/workers.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from strop.config import MAIN, Config, default_policy
from strop.engines.base import Engine
from strop.errors import ConfigError
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerOrder
from strop.gateway.limits import InFlight, Limits
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.gateway.worker import WorkerParts
from strop.gateway.workers import GatewayWorkers
from strop.run.machines import THIS_MACHINE, Machines
from strop.run.teacher import make_renderer
from strop.store.base import AttemptStore, Store
from strop.store.sql import SqlStore
from strop.types import Rollout, Sampling

MAX_AUTO = 4
CORES_EACH = 4
"""`gateway.workers=auto` starts one for so many cores: agents, engines and learner want the others."""
SESSIONS_EACH = 4
"""Sessions that a gateway process keeps open at most for each call that may be in flight: agents think, and use tools,
between their calls, and a session that was dropped is read from the store again."""
LOG = "gateway.log"


class AnsweringPolicy(Protocol):
    """A policy as the gateway knows it: `config` is the whole configuration that it would have as the only one, `model`
    the folder of its model."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Config: ...
    @property
    def model(self) -> Path: ...
    @property
    def renderer(self) -> Renderer: ...
    @property
    def engine(self) -> Engine: ...


class WorkerPolicy(Struct, frozen=True):
    """The same inside a worker."""

    name: str
    config: Config
    model: Path
    renderer: Renderer
    engine: Engine


class WorkerPolicies(Struct, frozen=True):
    """What a worker makes the same gateway from: each policy's configuration and the folder of its model."""

    config: Config
    policies: dict[str, tuple[Config, Path]]
    strict: bool


async def open_gateway(
    stack: AsyncExitStack,
    config: Config,
    policies: Sequence[AnsweringPolicy],
    store: Store,
    folder: Path,
    *,
    strict: bool,
    machines: Machines = THIS_MACHINE,
) -> Gateway:
    """The gateway before a run's policies, with its workers; `stack` closes it. Where it is `strict`, an agent that
    none of several policies takes is refused, unless there is one called main."""
    gateway = make_gateway(config, store, policies, strict=strict)
    stack.push_async_callback(gateway.routes.close)
    await gateway.routes.recall(store)
    num_workers = count_workers(config)
    if not policies or not isinstance(store, SqlStore):
        return gateway
    given = WorkerPolicies(config, {policy.name: (policy.config, policy.model) for policy in policies}, strict)
    place = config.gateway
    order = WorkerOrder(make=make_worker_gateway, given=given, host=place.host, hosts=place.hosts)
    engines = {policy.name: policy.engine for policy in policies}
    workers = machines.make_workers(gateway, store, engines, order)
    if workers is None and num_workers > 1:
        workers = GatewayWorkers(gateway, store, engines, num_workers, order, log=folder / LOG)
    if workers is not None:
        gateway.workers = workers
        stack.push_async_callback(workers.close)
        workers.start()
    return gateway


def count_workers(config: Config) -> int:
    """How many gateway processes there are beside the run's own; 1: that one answers. Raises `ConfigError`."""
    workers = config.gateway.workers
    if sys.platform != "linux":  # elsewhere processes cannot hand each other connections in this way
        if workers not in ("auto", 1):
            raise ConfigError(f"gateway.workers is {workers}, which needs Linux. Fix: leave it out")
        return 1
    if workers == "auto":
        cores = len(os.sched_getaffinity(0))
        return 1 if config.gateway.outside else max(1, min(MAX_AUTO, cores // CORES_EACH))
    if workers > 1 and config.gateway.outside:
        raise ConfigError(
            f"gateway.workers is {workers}, and gateway.outside has models, whose budgets are counted in one process. "
            "Fix: leave gateway.workers out"
        )
    return workers


def make_worker_gateway(given: WorkerPolicies, parts: WorkerParts) -> Gateway:
    """The same gateway inside a worker, whose engines and store are elsewhere."""
    policies = [
        WorkerPolicy(name, own, model, make_renderer(own.policy, model), parts.engine(name))
        for name, (own, model) in given.policies.items()
    ]
    return make_gateway(given.config, parts.store, policies, strict=given.strict, in_flight=parts.in_flight)


def make_gateway(
    config: Config,
    store: AttemptStore,
    policies: Sequence[AnsweringPolicy],
    *,
    strict: bool = False,
    in_flight: InFlight | None = None,
) -> Gateway:
    """The gateway of one process."""
    routes = {
        policy.name: PolicyRoute(
            policy=policy.name,
            model=policy.config.policy.model,
            engine=policy.engine,
            renderer=policy.renderer,
            sampling_for=partial(choose_sampling, policy.config),
            history=policy.config.policy.history,
            most=policy.config.policy.context,
        )
        for policy in policies
    }
    # One policy answers for all agents that no outside model answers for, whatever names it is trained on.
    several = policies if len(policies) > 1 else ()
    agents = {agent: routes[policy.name] for policy in several for agent in policy.config.policy.agents}
    given = config.gateway
    limits = Limits(in_flight=given.in_flight, per_attempt=given.in_flight_per_attempt, deadline=given.deadline)
    rest = routes[default_policy(routes)] if routes and (not strict or not several or MAIN in routes) else None
    return Gateway(
        store,
        Routes.of(rest, given.outside, agents),
        limits=limits,
        max_sessions=SESSIONS_EACH * given.in_flight,
        prompts=config.prompts,
        in_flight=in_flight,
    )


def choose_sampling(config: Config, rollout: Rollout) -> Sampling:
    """How a rollout samples, by its mode: a policy's settings win over what the agent asks for."""
    if rollout.mode == "train":
        return config.policy.train.sampling()
    sampling = config.policy.eval.sampling()
    return msgspec.structs.replace(sampling, temperature=0.0) if rollout.mode == "greedy" else sampling
