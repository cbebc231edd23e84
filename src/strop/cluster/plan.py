"""What runs where, before anything starts; or why it cannot, in a sentence.

Pure: it is told what the nodes have in all, and asks nobody. Ray places parts otherwise where others use some of a
node.

Left out: nodes that a cluster would add by itself once they are asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from strop.errors import PlaceError


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node that is alive. `trouble` is why it cannot be used, as a whole sentence with the fix in it.

    >>> ClusterNode(id="a1", address="10.0.0.7", cpus=8).name
    '10.0.0.7'
    """

    id: str
    address: str
    cpus: float = 0.0
    gpus: float = 0.0
    several: bool = False
    trouble: str = ""

    @property
    def name(self) -> str:
        """Its address, with the beginning of its id where `several` have that address."""
        return f"{self.address}/{self.id[:6]}" if self.several else self.address


class ServerDemand(Struct, frozen=True, kw_only=True):
    """So many servers of an engine, each with CPUs and GPUs, that answers so many sequences at once. With `beside` they
    are on the GPUs that ranks of the model of that number have: by turns where they `sleep`. `memory` is the share that
    each takes of the memory of its GPUs.

    >>> ServerDemand(count=2, gpus=4, engine="vllm").describe()
    '2 vllm servers of 1 CPU and 4 GPUs each'
    """

    count: int
    cpus: int = 1
    gpus: int = 0
    sequences: int = 0
    engine: str = "engine"
    memory: float = 0.0
    beside: int | None = None
    sleep: bool = False

    def find_ranks(self, number: int, ranks: int) -> list[int]:
        """Of so many ranks, those beside which the server of this number is: as many as it has GPUs.

        >>> servers = ServerDemand(count=2, gpus=2, beside=0)
        >>> [servers.find_ranks(number, ranks=4) for number in range(2)]
        [[0, 1], [2, 3]]
        """
        each = max(self.gpus, 1)
        first = number * each % ranks
        return list(range(first, first + each))

    def describe(self) -> str:
        gpu = f" and {count(self.gpus, 'GPU')}" if self.gpus else ""
        return f"{count(self.count, f'{self.engine} server')} of {count(self.cpus, 'CPU')}{gpu} each"


def list_each(servers: Sequence[ServerDemand]) -> list[tuple[ServerDemand, int]]:
    """What every single one is part of, and which of these it is."""
    return [(one, index) for one in servers for index in range(one.count)]


class RankBundle(Struct, frozen=True):
    """So many ranks of a model, from the `first` on, that are on one node with the servers that are beside them; and
    what all of them take."""

    first: int
    ranks: int
    cpus: int
    gpus: int


class Demand(Struct, frozen=True, kw_only=True):
    """What a run asks for: `ranks` of every model, each with so many CPUs and GPUs; `servers` of engines; `gateways`;
    `runners` pools of `agents` agents at once; `sequences` that a rank answers at once, none where servers do."""

    ranks: tuple[int, ...]
    rank_cpus: int = 1
    rank_gpus: int = 0
    gateways: int = 0
    gateway_cpus: int = 1
    runners: int = 1
    runner_cpus: int = 1
    agents: int = 16
    sequences: int = 16
    servers: tuple[ServerDemand, ...] = ()

    def list_bundles(self, model: int) -> list[RankBundle]:
        """Of a model's ranks.

        >>> servers = ServerDemand(count=2, cpus=3, gpus=2, beside=0)
        >>> [(bundle.ranks, bundle.cpus) for bundle in Demand(ranks=(5,), servers=(servers,)).list_bundles(0)]
        [(2, 5), (2, 5), (1, 1)]
        """
        ranks, beside = self.ranks[model], [one for one in self.servers if one.beside == model]
        each = max((one.gpus for one in beside), default=1) or 1
        bundles: list[RankBundle] = []
        for first in range(0, ranks, each):
            size = min(each, ranks - first)
            servers = sum(one.cpus for one, index in list_each(beside) if one.find_ranks(index, ranks)[0] == first)
            bundles.append(RankBundle(first, size, size * self.rank_cpus + servers, size * self.rank_gpus))
        return bundles

    def find_taken(self, model: int) -> float:
        """The share of the memory of its first rank's GPU that servers have while it trains."""
        awake = [one for one in self.servers if one.beside == model and not one.sleep]
        return sum(one.memory for one, index in list_each(awake) if 0 in one.find_ranks(index, self.ranks[model]))


class ClusterPlan(Struct, frozen=True, kw_only=True):
    """Which node each rank of every model, each engine server, each gateway and each runner pool is to be on."""

    demand: Demand
    ranks: list[list[ClusterNode]]
    runners: list[ClusterNode]
    servers: list[ClusterNode] = []
    gateways: list[ClusterNode] = []
    memory: str = ""

    def describe(self) -> list[str]:
        """As lines."""
        number, lines = 0, list[str]()
        for group in self.ranks:
            gpu = f", {count(self.demand.rank_gpus, 'GPU')}" if self.demand.rank_gpus else ""
            for node in group:
                lines.append(f"rank {number} on {node.name}: {count(self.demand.rank_cpus, 'CPU')}{gpu}")
                number += 1
        for k, ((one, index), node) in enumerate(zip(list_each(self.demand.servers), self.servers, strict=True)):
            gpu = f", {one.memory:.0%} of {count(one.gpus, 'GPU')}" if one.gpus else ""
            if one.beside is not None:
                gpu += f" of {self._name_ranks(one, index)}, {'by turns' if one.sleep else 'at the same time'}"
            lines.append(f"engine server {k} ({one.engine}) on {node.name}: {count(one.cpus, 'CPU')}{gpu}")
        each = count(self.demand.gateway_cpus, "CPU")
        lines += [f"gateway {k} on {node.name}: {each}" for k, node in enumerate(self.gateways)]
        each = f"{count(self.demand.runner_cpus, 'CPU')}, {count(self.demand.agents, 'agent')} at once"
        lines += [f"runner pool {k} on {node.name}: {each}" for k, node in enumerate(self.runners)]
        return [*lines, *([self.memory] if self.memory else []), self.find_bottleneck()]

    def _name_ranks(self, servers: ServerDemand, index: int) -> str:
        assert servers.beside is not None
        before = sum(self.demand.ranks[: servers.beside])
        found = [str(before + rank) for rank in servers.find_ranks(index, self.demand.ranks[servers.beside])]
        return f"rank{'s' * (len(found) > 1)} {', '.join(found)}"

    def find_bottleneck(self) -> str:
        demand = self.demand
        agents = demand.runners * demand.agents
        sequences = sum(demand.ranks) * demand.sequences + sum(one.count * one.sequences for one in demand.servers)
        told = f"{count(agents, 'agent')} at once, {count(sequences, 'sequence')} that engines answer at once"
        which = "engines" if agents > sequences else "agents"
        return f"expected bottleneck while collecting: {which} ({told})"


def make_plan(nodes: Sequence[ClusterNode], demand: Demand) -> ClusterPlan:
    """Ranks of a model on as few nodes as possible, then servers, gateways and runner pools where most is left. Raises
    `PlaceError`."""
    usable = [node for node in nodes if node.cpus]
    if trouble := next((node.trouble for node in usable if node.trouble), ""):
        raise PlaceError(trouble)
    refuse_missing_gpus(usable, demand)
    try:
        return arrange(usable, demand)
    except NoRoom as error:
        fix = find_fix(usable, demand, error.kind)
        raise PlaceError(f"{error.what}. Fix: {fix}, or add nodes") from None


class NoRoom(PlaceError):
    """`what` cannot be placed, of which `kind`."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{what}. Fix: add nodes")
        self.kind, self.what = kind, what


def arrange(nodes: Sequence[ClusterNode], demand: Demand) -> ClusterPlan:
    left, ranks = Room(nodes), list[list[ClusterNode]]()
    for model in range(len(demand.ranks)):
        bundles = demand.list_bundles(model)
        if len(group := left.take_packed(bundles)) < len(bundles):
            raise NoRoom("ranks", explain_ranks(nodes, demand))
        ranks.append([node for node, bundle in zip(group, bundles, strict=True) for _ in range(bundle.ranks)])
    servers, gateways = place_servers(left, demand, ranks), place_gateways(left, demand)
    runners = place_runners(left, demand)
    return ClusterPlan(demand=demand, ranks=ranks, servers=servers, gateways=gateways, runners=runners)


class Room:
    """What nodes have left, as parts of a run are placed on them one after the other."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self.nodes = nodes
        self.cpus = {node.id: node.cpus for node in nodes}
        self.gpus = {node.id: node.gpus for node in nodes}

    def fits(self, node: ClusterNode, cpus: float, gpus: float = 0) -> bool:
        return self.cpus[node.id] >= cpus and self.gpus[node.id] >= gpus

    def take(self, node: ClusterNode, cpus: float, gpus: float = 0) -> None:
        self.cpus[node.id] -= cpus
        self.gpus[node.id] -= gpus

    def take_packed(self, bundles: Sequence[RankBundle]) -> list[ClusterNode]:
        """Nodes for what belongs together: the smallest that holds all of it, or else as few as possible; fewer than
        bundles where there is no more room."""
        cpus, gpus = sum(one.cpus for one in bundles), sum(one.gpus for one in bundles)
        by_size = sorted(self.nodes, key=lambda node: (self.gpus[node.id] if gpus else 0, self.cpus[node.id]))
        placed: list[ClusterNode] = []
        for node in [node for node in by_size if self.fits(node, cpus, gpus)][:1] or reversed(by_size):
            for one in bundles[len(placed) :]:
                if not self.fits(node, one.cpus, one.gpus):
                    break
                self.take(node, one.cpus, one.gpus)
                placed.append(node)
        return placed

    def take_spread(self, number: int, cpus: float, gpus: float = 0) -> list[ClusterNode]:
        """Nodes for so many parts that go by themselves, each where there are fewest, and of those where most CPUs are
        left; fewer where there is no more room."""
        placed, there = list[ClusterNode](), Counter[str]()
        while len(placed) < number and (fits := [node for node in self.nodes if self.fits(node, cpus, gpus)]):
            node = min(fits, key=lambda node: (there[node.id], -self.cpus[node.id], node.id))
            self.take(node, cpus, gpus)
            there[node.id] += 1
            placed.append(node)
        return placed


def place_servers(left: Room, demand: Demand, ranks: Sequence[Sequence[ClusterNode]]) -> list[ClusterNode]:
    """One after the other, as they are demanded; each is on one node with all of its GPUs."""
    placed: list[ClusterNode] = []
    for one in demand.servers:
        if one.beside is not None:
            there = ranks[one.beside]
            placed += [there[one.find_ranks(index, len(there))[0]] for index in range(one.count)]
            continue
        found = left.take_spread(one.count, one.cpus, one.gpus)
        if len(found) < one.count:
            raise NoRoom(
                "servers",
                f"{one.describe()} cannot be placed: the cluster has {describe_nodes(left.nodes)}, and beside the "
                f"ranks there is room for {len(found)}",
            )
        placed += found
    return placed


def place_gateways(left: Room, demand: Demand) -> list[ClusterNode]:
    placed = left.take_spread(demand.gateways, demand.gateway_cpus)
    if len(placed) < demand.gateways:
        raise NoRoom(
            "gateways",
            f"{count(demand.gateways, 'gateway')} of {count(demand.gateway_cpus, 'CPU')} each cannot be placed: the "
            f"cluster has {describe_nodes(left.nodes)}, and beside the ranks there is room for {len(placed)}",
        )
    return placed


def place_runners(left: Room, demand: Demand) -> list[ClusterNode]:
    placed = left.take_spread(demand.runners, demand.runner_cpus)
    if len(placed) < demand.runners:
        others = "ranks and servers" if demand.servers else "ranks"
        raise NoRoom(
            "runners",
            f"{count(demand.runners, 'runner pool')} of {count(demand.runner_cpus, 'CPU')} each cannot be placed: "
            f"the cluster has {describe_nodes(left.nodes)}, and beside the {others} there is room for {len(placed)}",
        )
    return placed


def find_fix(nodes: Sequence[ClusterNode], demand: Demand, kind: str) -> str:
    """The setting with which all would have room, of those parts that have none or else of the ranks."""
    asleep = [one.count * one.gpus for one in demand.servers if one.sleep and one.beside is not None]
    for name in (kind, "ranks"):
        setting, least, most = {
            "ranks": ("learner.ranks", max([1, *asleep]), max(demand.ranks, default=1) - 1),
            "servers": ("engine.replicas", 1, max((one.count for one in demand.servers), default=1) - 1),
            "gateways": ("cluster.gateways", 0, demand.gateways - 1),
            "runners": ("cluster.runners", 1, demand.runners - 1),
        }[name]
        fits = partial(has_room, nodes, demand, name)
        if most >= least and fits(least):
            number = least + bisect_left(range(least + 1, most + 1), True, key=lambda number: not fits(number))
            return f"set {setting}={number}"
    tensors = next((one for one in demand.servers if one.gpus > 1), None)
    if kind == "servers" and tensors is not None:
        return f"set engine.{tensors.engine}.tensor_parallel lower"
    if kind == "servers" and any(one.cpus > 1 for one in demand.servers):
        return "set cluster.server_cpus lower"
    if kind == "ranks" and asleep:
        return "set engine.replicas and learner.ranks lower"
    if kind == "ranks" and demand.rank_cpus > 1:
        return "set cluster.rank_cpus lower"
    return "start Ray with more CPUs than there are (--num-cpus)"


def has_room(nodes: Sequence[ClusterNode], demand: Demand, kind: str, number: int) -> bool:
    """Whether there is for so many of this kind, of each model and engine."""
    fewer = {
        "ranks": replace(demand, ranks=tuple(min(one, number) for one in demand.ranks)),
        "servers": replace(demand, servers=tuple(replace(one, count=min(one.count, number)) for one in demand.servers)),
        "gateways": replace(demand, gateways=number),
        "runners": replace(demand, runners=number),
    }[kind]
    try:
        arrange(nodes, fewer)
    except NoRoom:
        return False
    return True


def refuse_missing_gpus(nodes: Sequence[ClusterNode], demand: Demand) -> None:
    if not nodes:
        raise PlaceError("no node of the cluster has CPUs to give. Fix: add one with `ray start --address=HEAD:PORT`")
    if sum(demand.ranks) and demand.rank_gpus and not any(node.gpus for node in nodes):
        raise PlaceError(
            f"learner.device is cuda, and no node of the cluster has a GPU ({describe_nodes(nodes)}). Fix: add nodes "
            "with GPUs, or set learner.device=cpu"
        )


def explain_ranks(nodes: Sequence[ClusterNode], demand: Demand) -> str:
    ranks = sum(demand.ranks)
    bundles = [one for model in range(len(demand.ranks)) for one in demand.list_bundles(model)]
    largest = max(bundles, key=lambda bundle: (bundle.cpus, bundle.gpus))
    gpu = f" and {count(demand.rank_gpus, 'GPU')}" if demand.rank_gpus else ""
    more = largest.cpus - largest.ranks * demand.rank_cpus
    beside = f", with {count(more, 'CPU')} for servers beside {largest.ranks} of them" if more else ""
    room = sum(
        int(min(node.cpus // largest.cpus, node.gpus // largest.gpus if largest.gpus else math.inf)) * largest.ranks
        for node in nodes
    )
    return (
        f"{count(ranks, 'learner rank')} of {count(demand.rank_cpus, 'CPU')}{gpu} each{beside} cannot be placed: the "
        f"cluster has {describe_nodes(nodes)}, which is room for {room}"
    )


def describe_nodes(nodes: Sequence[ClusterNode]) -> str:
    """
    >>> describe_nodes([ClusterNode(id="a", address="h", cpus=2), ClusterNode(id="b", address="h", cpus=4, gpus=1)])
    '6 CPUs and 1 GPU on 2 nodes'
    """
    cpus, gpus = (int(sum(getattr(node, part) for node in nodes)) for part in ("cpus", "gpus"))
    return f"{count(cpus, 'CPU')} and {count(gpus, 'GPU')} on {count(len(nodes), 'node')}"


def count(number: int, what: str) -> str:
    """
    >>> count(1, "CPU"), count(2, "node")
    ('1 CPU', '2 nodes')
    """
    return f"{number} {what}{'s' * (number != 1)}"
