"""What a run asks of a cluster, and finding room for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from strop.cluster.hosts import FORESEE_SECONDS, HostPlace
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
from strop.cluster.probe import Address, list_nodes, listen_at, probe_nodes
from strop.cluster.ranks import Reservation
from strop.cluster.servers import ServerHosts, find_server_demand
from strop.config import Config
from strop.engines.registry import engine_class
from strop.errors import PlaceError
from strop.net.hosts import is_loopback
from strop.net.server import ANY
from strop.run.data.prepare import needs_agents
from strop.run.prepare import PreparedPolicy, count_ranks, find_adapters

ANSWER_SECONDS = FORESEE_SECONDS + 30.0
"""Seconds in which a host must have answered how much memory a rank will take."""


class NodeJoined(PlaceError):
    """Ray has placed something on a node that came after all were asked what they are like."""


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
    with listen_at(listener.address, find_gateway(config, listener.address)) as ports:
        nodes = probe_nodes(ray, list_nodes(ray), Path(config.folder), models, ports, given_up)
    demand = find_demand(config, groups, nodes)
    make_plan(nodes, demand)
    reservations.extend(Reservation(ray, model, demand) for model in range(len(demand.ranks)))
    for one in reservations:
        one.open(deadline, given_up)
    ranks = [find_nodes(nodes, one.places) for one in reservations]
    left = Room([node for node in nodes if node.cpus])
    for model, group in enumerate(ranks):
        for bundle in demand.list_bundles(model):
            left.take(group[bundle.first], bundle.cpus, bundle.gpus)
    wanted = place_servers(left, demand, ranks)
    hosts = find_nodes(nodes, servers.open(demand.servers, wanted, reservations, deadline, given_up))
    gateways, runners = place_gateways(left, demand), place_runners(left, demand)
    memory = ""
    if not again and not given_up.is_set():
        taken = [demand.find_taken(model) for model in range(len(reservations))]
        memory = foresee_memory(ray, hold_weights(groups), reservations, taken)
    return ClusterPlan(demand=demand, ranks=ranks, servers=hosts, gateways=gateways, runners=runners, memory=memory)


def find_nodes(nodes: Sequence[ClusterNode], places: Sequence[HostPlace]) -> list[ClusterNode]:
    """Where hosts are. Raises `NodeJoined`."""
    by_id = {node.id: node for node in nodes}
    if new := next((place for place in places if place.node not in by_id), None):
        raise NodeJoined(f"node {new.name} joined the cluster while places were looked for. Fix: try again")
    return [by_id[place.node] for place in places]


def find_gateway(config: Config, listener: Address) -> Address | None:
    """Where runner pools will reach this command, if that is known by now."""
    if not config.gateway.port or not needs_agents(config):
        return None
    host = config.gateway.host
    return (listener[0] if is_loopback(host) or host in ANY else host), config.gateway.port


def give_back(reservations: list[Reservation], servers: ServerHosts) -> None:
    servers.close()
    while reservations:
        reservations.pop().close()


def hold_weights(groups: Sequence[Sequence[PreparedPolicy]]) -> list[Sequence[PreparedPolicy]]:
    """Those that ranks of ours hold: not what is never trained, where another engine serves it."""
    return [group for group in groups if count_ranks(group, train=True)]


def find_servers(config: Config, groups: Sequence[Sequence[PreparedPolicy]], *, gpus: bool) -> tuple[ServerDemand, ...]:
    """What engines that are servers ask for, in the order in which a run makes them."""
    found: list[ServerDemand | None] = []
    models = 0  # that ranks hold
    for group in groups:
        ranks = count_ranks(group, train=True)
        engines = 1 if find_adapters(group) else len(group)
        held = {"model": models, "ranks": ranks} if ranks else {}
        models += bool(ranks)
        engine = group[0].config.engine
        found.append(find_server_demand(engine, engines, cpus=config.cluster.server_cpus, gpus=gpus, **held))
    return tuple(one for one in found if one is not None)


def find_demand(config: Config, groups: Sequence[Sequence[PreparedPolicy]], nodes: Sequence[ClusterNode]) -> Demand:
    """What the settings ask for. With learner.device=auto every rank has a GPU where the cluster has enough of them."""
    holding = hold_weights(groups)
    ranks = tuple(count_ranks(group, train=True) for group in holding)
    devices = {one.config.learner.device for group in holding for one in group}
    gpus = sum(node.gpus for node in nodes)
    enough = gpus >= sum(ranks) > 0
    serve = any(engine_class(group[0].config.engine).shares_weights for group in holding)
    rank_gpus = int("cuda" in devices or ("auto" in devices and enough))
    servers = find_servers(config, groups, gpus=gpus > 0)
    if not rank_gpus:
        refuse_ipc(holding, sum(ranks), int(gpus))
        if not gpus and any(one.sleep for one in servers):
            raise PlaceError(
                "engine.vllm.sleep gives a GPU's memory to the learner, and the cluster has no GPU. Fix: set it to "
                "false, or add nodes with GPUs"
            )
        servers = tuple(replace(one, beside=None) for one in servers)
    return Demand(
        ranks=ranks,
        rank_cpus=config.cluster.rank_cpus,
        rank_gpus=rank_gpus,
        gateways=config.cluster.gateways if needs_agents(config) else 0,
        gateway_cpus=config.cluster.gateway_cpus,
        runners=config.cluster.runners if needs_agents(config) else 0,
        runner_cpus=config.cluster.runner_cpus,
        agents=config.runner.workers,
        sequences=config.engine.max_sequences if serve else 0,
        servers=servers,
    )


def refuse_ipc(groups: Sequence[Sequence[PreparedPolicy]], ranks: int, gpus: int) -> None:
    """Where ranks have no GPUs whose memory could be read. Raises `PlaceError`."""
    engines = [group[0].config.engine for group in groups]
    if any(engine_class(one).choose_transfer(one) == "ipc" for one in engines):
        raise PlaceError(
            f"engine.vllm.weights=ipc reads the memory of the learner's GPU, and its {ranks} "
            f"rank{'s have' if ranks > 1 else ' has'} none of the cluster's {gpus}. Fix: set "
            f"{'learner.device=cuda, or ' if gpus else ''}engine.vllm.weights=files"
        )


def foresee_memory(
    ray: Any,
    groups: Sequence[Sequence[PreparedPolicy]],
    reservations: Sequence[Reservation],
    taken: Sequence[float],
) -> str:
    """What an update will take on the node of each model's first rank, where so much of its GPU is `taken`. Raises
    `PlaceError` where that is too much."""
    told: list[str] = []
    for group, reservation, share in zip(groups, reservations, taken, strict=True):
        trained = [one for one in group if not one.config.policy.frozen]
        if not trained:
            continue
        asked = MemoryQuestion(trained[0].config, str(trained[0].model), reservation.ranks, share)
        try:
            found = ray.get(reservation.hosts[0].foresee.remote(msgspec.json.encode(asked)), timeout=ANSWER_SECONDS)
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
