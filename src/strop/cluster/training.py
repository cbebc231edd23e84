"""A training run on a Ray cluster: the same `train` as on one machine, with its processes placed by Ray.

    join ──▶ prepare (settings, model) ──▶ probe ──▶ plan ──▶ reserve ──▶ run/loop.train
              ▲                                                           │ a rank or its node is lost: LearnerDied,
              │                                                           │ or out of memory: smaller micro-batches
              └────── again, from the last checkpoint (resume) ◀──────────┘

A lost rank takes the whole group of ranks with it, since each waits for the others: all of it is closed and made anew.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from strop.cluster.connection import find_head, import_ray, join_cluster, watch_head
from strop.cluster.gateways import LOOPBACK, NodeGateways, share_out
from strop.cluster.journal import Journal
from strop.cluster.listener import ChildListener
from strop.cluster.memory import MemoryQuestion, RankMemory
from strop.cluster.plan import (
    ClusterNode,
    ClusterPlan,
    Demand,
    Room,
    ServerDemand,
    make_plan,
    place_gateways,
    place_runners,
    place_servers,
)
from strop.cluster.pools import RunnerPools
from strop.cluster.probe import list_nodes, probe_nodes
from strop.cluster.ranks import ClusterLauncher, Reservation
from strop.cluster.servers import ServerHosts, find_server_demand
from strop.config import Config
from strop.engines.base import Engine
from strop.engines.registry import engine_class
from strop.errors import ConfigError, HeadLost, LearnerDied, PlaceError, RankOutOfMemory
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerOrder
from strop.gateway.worker_process import EncodedStore
from strop.monitor.console import View
from strop.monitor.summary import Summary
from strop.run.data.prepare import needs_agents
from strop.run.loop import train as train_with
from strop.run.machines import Machines
from strop.run.runtime import PreparedPolicy, count_ranks, find_adapters, group_by_process, prepare_run
from strop.run.settings import check_agents
from strop.run.state import Run
from strop.run.supervise import run_beside

FORESEE_SECONDS = 120.0
AGAIN = 2.0
"""Seconds between two attempts to find room again once a node is lost."""


async def train(
    config: Config,
    view: View,
    *,
    resume: bool = False,
    changes: Mapping[str, tuple[Any, Any]] | None = None,
    stop: asyncio.Event | None = None,
) -> Summary:
    """See `strop.run.loop.train`. Where a process that holds weights is lost, the run goes on from its last
    checkpoint."""
    ray = import_ray()
    refuse_settings(config)
    groups = await find_groups(config)
    with ExitStack() as stack:
        joining = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, join_cluster(config.cluster.address)))
        try:
            address = await asyncio.shield(joining)
            journal, failed, reached = Journal(Path(config.folder), view), 0, 0
            while True:
                machines = None
                try:
                    async with reserve(ray, config, groups, address, journal, view, again=failed > 0) as machines:
                        return await train_with(
                            config, view, resume=resume, changes=changes, stop=stop, machines=machines
                        )
                except (LearnerDied, RankOutOfMemory) as error:
                    run = machines.run if machines is not None else None
                    if run is not None:
                        changes = None  # they are written down by then
                    step = run.step if run is not None else 0
                    failed, reached = 1 if step > reached else failed + 1, max(step, reached)
                    why = str(error).partition("; its log")[0].partition(". Fix:")[0]
                    journal.write("died", "learner", why=why)
                    if failed > config.cluster.restarts or (stop is not None and stop.is_set()):
                        raise
                    if isinstance(error, RankOutOfMemory):
                        less = halve_micro_batches(config)
                        budgets = config.learner.start_budget, less.learner.start_budget
                        config, changes = less, {**(changes or {}), "learner.start_budget": budgets}
                begun = (Path(config.folder) / "config.json").exists()
                view.note("the learner is started again" + (", from the run's last checkpoint" if begun else ""))
                resume = begun
        finally:
            await asyncio.gather(joining, return_exceptions=True)  # or else Ray would be joined behind our back


def refuse_settings(config: Config) -> None:
    """What a cluster does not do."""
    check_agents(config)
    if config.cluster.gateways:
        share_out(config)
    if not config.runner.workers and needs_agents(config):
        raise ConfigError(
            "runner.workers is 0, and on a cluster it says how many agents each runner pool has at once. Fix: raise it"
        )


async def find_groups(config: Config) -> list[list[PreparedPolicy]]:
    """Policies by the model that they share, if they do."""
    groups = group_by_process((await prepare_run(config)).policies, train=True)
    find_servers(config, groups, gpus=False)  # refuses what cannot be
    return groups


def hold_weights(groups: Sequence[Sequence[PreparedPolicy]]) -> list[Sequence[PreparedPolicy]]:
    """Those that ranks of ours hold: not what is never trained, where another engine serves it."""
    return [group for group in groups if count_ranks(group, train=True)]


def find_servers(config: Config, groups: Sequence[Sequence[PreparedPolicy]], *, gpus: bool) -> tuple[ServerDemand, ...]:
    """What engines that are servers ask for, in the order in which a run makes them."""
    cpus = config.cluster.server_cpus
    found = [
        find_server_demand(group[0].config.engine, 1 if find_adapters(group) else len(group), cpus=cpus, gpus=gpus)
        for group in groups
    ]
    return tuple(one for one in found if one is not None)


def halve_micro_batches(config: Config) -> Config:
    """The same with micro-batches of half the size, for ranks of which one ran out of memory."""
    learner = config.learner
    half = max(1, (learner.start_budget or learner.token_budget) // 2)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(learner, start_budget=half))


class ClusterMachines(Machines):
    """One opening of a run on a cluster. `run` is it, once its agents may begin. `make_gateways` makes those that are
    on nodes, if there are to be some."""

    def __init__(
        self,
        launcher: ClusterLauncher,
        servers: ServerHosts,
        pools: RunnerPools | None,
        address: str,
        head: str,
        make_gateways: Callable[..., NodeGateways] | None = None,
    ) -> None:
        self.launcher, self.servers = launcher, servers
        self.run: Run | None = None
        self._pools, self._address, self._head, self._make_gateways = pools, address, head, make_gateways
        self._gateways: NodeGateways | None = None

    def adapt(self, config: Config) -> Config:
        """Agents run elsewhere, and the run is to be reached from there."""
        if self._pools is None:
            return config
        replace = msgspec.structs.replace
        host = self._address if config.gateway.host in LOOPBACK else config.gateway.host
        runner = replace(config.runner, remote=True, workers=0)
        config = replace(config, runner=runner, gateway=replace(config.gateway, host=host))
        return config if self._make_gateways is None else share_out(config)

    def make_workers(
        self, gateway: Gateway, store: EncodedStore, engines: Mapping[str, Engine], order: WorkerOrder
    ) -> NodeGateways | None:
        if self._make_gateways is not None:
            self._gateways = self._make_gateways(gateway, store, engines, order)
        return self._gateways

    async def watch(self, run: Run) -> None:
        self.run = run
        working = super().watch(run) if self._pools is None else self._pools.watch(run, self._gateways)
        await run_beside(working, watch_head(self._head))


@asynccontextmanager
async def reserve(
    ray: Any,
    config: Config,
    groups: Sequence[Sequence[PreparedPolicy]],
    address: str,
    journal: Journal,
    view: View,
    *,
    again: bool,
) -> AsyncGenerator[ClusterMachines]:
    """Room on the cluster for the processes of a run, given back at the end of the block. The plan is shown before
    anything starts."""
    listener = ChildListener(address, config.cluster.port)
    reservations: list[Reservation] = []
    servers = ServerHosts(ray, config.cluster, journal)
    given_up = threading.Event()
    try:
        deadline = time.monotonic() + config.cluster.timeout
        while True:
            args = ray, config, groups, listener, reservations, servers, deadline, again, given_up
            placing = asyncio.ensure_future(asyncio.to_thread(place, *args))
            try:
                plan = await asyncio.shield(placing)
                break
            except asyncio.CancelledError:
                given_up.set()
                await asyncio.gather(placing, return_exceptions=True)  # or else it would reserve behind our back
                raise
            except PlaceError:  # a node that was lost may come back, and Ray needs a while to notice
                if not again or time.monotonic() + AGAIN > deadline:
                    raise
                await asyncio.to_thread(give_back, reservations, servers)
                await asyncio.sleep(AGAIN)
        for line in plan.describe():
            journal.write("planned", line)
            if not again:
                view.note(f"plan: {line}")
        pools = RunnerPools(ray, config, plan.runners, journal) if plan.runners else None
        make = partial(NodeGateways, ray, config, plan.gateways, listener, journal) if plan.gateways else None
        launcher = ClusterLauncher(ray, reservations, listener, journal)
        yield ClusterMachines(launcher, servers, pools, address, find_head(ray), make)
    except HeadLost:
        reservations.clear()  # they are gone with it, and whoever asked to be rid of them would wait for a minute
        servers.forget()
        raise
    finally:
        listener.close()
        await asyncio.shield(asyncio.to_thread(give_back, reservations, servers))


def place(
    ray: Any,
    config: Config,
    groups: Sequence[Sequence[PreparedPolicy]],
    listener: ChildListener,
    reservations: list[Reservation],
    servers: ServerHosts,
    deadline: float,
    again: bool,
    given_up: threading.Event,
) -> ClusterPlan:
    """Fill `reservations` and `servers`, and say what is where. Raises `PlaceError`."""
    models = [str(one.model) for group in groups for one in group]
    nodes = probe_nodes(ray, list_nodes(ray), Path(config.folder), models, listener.address)
    demand = find_demand(config, groups, nodes)
    make_plan(nodes, demand)
    reservations.extend(Reservation(ray, ranks, demand) for ranks in demand.ranks)
    for one in reservations:
        one.open(deadline, given_up)
    by_id = {node.id: node for node in nodes}
    ranks = [[by_id[host.node] for host in one.places] for one in reservations]
    left = Room([node for node in nodes if node.cpus])
    for node in (node for group in ranks for node in group):
        left.take(node, demand.rank_cpus, demand.rank_gpus)
    wanted = place_servers(left, demand)
    hosts = [by_id[one.node] for one in servers.open(demand.servers, wanted, deadline, given_up)]
    gateways, runners = place_gateways(left, demand), place_runners(left, demand)
    memory = "" if again or given_up.is_set() else foresee_memory(ray, hold_weights(groups), reservations)
    return ClusterPlan(demand=demand, ranks=ranks, servers=hosts, gateways=gateways, runners=runners, memory=memory)


def give_back(reservations: list[Reservation], servers: ServerHosts) -> None:
    servers.close()
    while reservations:
        reservations.pop().close()


def find_demand(config: Config, groups: Sequence[Sequence[PreparedPolicy]], nodes: Sequence[ClusterNode]) -> Demand:
    """What the settings ask for. With learner.device=auto every rank has a GPU where the cluster has enough of them."""
    holding = hold_weights(groups)
    ranks = tuple(count_ranks(group, train=True) for group in holding)
    devices = {one.config.learner.device for group in holding for one in group}
    gpus = sum(node.gpus for node in nodes)
    enough = gpus >= sum(ranks) > 0
    serve = any(engine_class(group[0].config.engine).shares_weights for group in holding)
    return Demand(
        ranks=ranks,
        rank_cpus=config.cluster.rank_cpus,
        rank_gpus=int("cuda" in devices or ("auto" in devices and enough)),
        gateways=config.cluster.gateways if needs_agents(config) else 0,
        gateway_cpus=config.cluster.gateway_cpus,
        runners=config.cluster.runners if needs_agents(config) else 0,
        runner_cpus=config.cluster.runner_cpus,
        agents=config.runner.workers,
        sequences=config.engine.max_sequences if serve else 0,
        servers=find_servers(config, groups, gpus=gpus > 0),
    )


def foresee_memory(ray: Any, groups: Sequence[Sequence[PreparedPolicy]], reservations: Sequence[Reservation]) -> str:
    """What an update will take on the node of each model's first rank. Raises `PlaceError` where that is too much."""
    told: list[str] = []
    for group, reservation in zip(groups, reservations, strict=True):
        trained = [one for one in group if not one.config.policy.frozen]
        if not trained:
            continue
        asked = MemoryQuestion(trained[0].config, str(trained[0].model), reservation.ranks)
        try:
            found = ray.get(reservation.hosts[0].foresee.remote(msgspec.json.encode(asked)), timeout=FORESEE_SECONDS)
        except ray.exceptions.RayError:
            continue
        if not found:  # what counts is missing there: the rank will say so itself
            continue
        memory = msgspec.json.decode(found, type=RankMemory)
        if memory.advice:
            where = reservation.places[0].address
            raise PlaceError(
                f"{memory.describe(reservation.ranks)}, on {where}. Fix: {memory.advice.rpartition(': ')[2]}"
            )
        told.append(memory.describe(reservation.ranks))
    return "; ".join(told)
