"""Engines' servers on the GPUs of learner ranks. A real Ray cluster has these in name only; vLLM has a stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.cluster.connection import import_ray, join_cluster
from strop.cluster.journal import Journal
from strop.cluster.plan import Demand, Room, ServerDemand, place_servers
from strop.cluster.probe import list_nodes
from strop.cluster.ranks import Reservation
from strop.cluster.servers import ServerHosts
from strop.config import ClusterConfig, EngineConfig
from strop.engines import remote
from strop.engines.base import EngineSetup
from strop.engines.gpus import VISIBLE, place_replicas
from strop.engines.vllm.engine import Vllm
from strop.gateway.replicas import Replicas
from strop.monitor.console import Silent
from strop.types import Sampling
from tests.integration.cluster.nodes import Nodes
from tests.limits import stretch
from tests.unit.engines.test_vllm import Stand, until

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """The first has room for two ranks, the others for one and none."""
    nodes = Nodes()
    for cpus, gpus in ((4, 2), (2, 1), (4, 0)):
        nodes.add(cpus, num_gpus=gpus)
    with join_cluster(nodes.address):
        yield nodes
    nodes.close()


class Ranks:
    """Three, and vLLM servers beside them, which sleep."""

    def __init__(self, folder: Path, servers: int, gpus: int) -> None:
        ray = import_ray()
        wanted = ServerDemand(count=servers, gpus=gpus, engine="vllm", beside=0, sleep=True)
        self.folder, self.demand = folder, Demand(ranks=(3,), rank_gpus=1, servers=(wanted,))
        self.reservation = Reservation(ray, 0, self.demand)
        self.hosts = ServerHosts(ray, ClusterConfig(timeout=20.0), Journal(folder, Silent()))
        self.stand = Stand(folder, sleep=True)
        self.config = EngineConfig(name="vllm", replicas=servers, vllm=self.stand.settings)
        for number in range(1, servers + 1):
            (folder / f"replica-{number}").mkdir()

    async def open(self) -> None:
        await asyncio.to_thread(self._open)
        made = EngineSetup(
            model=self.stand.model, config=self.config, folder=self.folder, renewed=True, servers=self.hosts
        )
        self.engines: list[Any] = [Vllm.make(one) for one in place_replicas(made, beside_learner=True)]
        self.engine = Replicas(self.engines)
        await self.engine.start()

    def _open(self) -> None:
        deadline, given_up = time.monotonic() + stretch(30), threading.Event()
        self.reservation.open(deadline, given_up)
        nodes = {node.id: node for node in list_nodes(import_ray())}
        there = [nodes[place.node] for place in self.reservation.places]
        wanted = place_servers(Room(list(nodes.values())), self.demand, [there])
        self.hosts.open(self.demand.servers, wanted, [self.reservation], deadline, given_up)

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "cluster.jsonl").read_text().splitlines()]
        return sorted((line for line in lines if line["event"] == event), key=lambda line: line["what"])

    def find_gpus(self) -> list[tuple[str, str]]:
        """The node and the GPUs of each rank."""
        return [(place.name, self.reservation.find_gpus([rank])) for rank, place in enumerate(self.reservation.places)]

    async def close(self) -> None:
        await self.engine.close()
        self.hosts.close()
        self.reservation.close()


@pytest.fixture
async def ranks(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Ranks]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    ranks = Ranks(tmp_path, servers=3, gpus=1)
    await ranks.open()
    yield ranks
    await ranks.close()


def read_variable(pid: int, name: str) -> str:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)[name]


async def test_each_has_the_gpu_of_a_rank_and_sleeps_while_that_works(ranks: Ranks) -> None:
    started = ranks.events("started")
    told = [(one["node"], read_variable(one["pid"], VISIBLE)) for one in started]
    assert told == ranks.find_gpus()
    assert len(set(told)) == 3
    await ranks.engine.pause()
    await until(lambda: sum(asked.get("path") == "/sleep" for asked in ranks.stand.asked()) == 3)
    await ranks.engine.resume()
    assert [chunk.version async for chunk in ranks.engine.generate([1, 2], Sampling(max_tokens=1), stop_ids=[])]


@pytest.mark.parametrize("which", ["pid", "host"])
async def test_one_that_is_killed_comes_back_beside_its_rank(ranks: Ranks, which: str) -> None:
    second = ranks.engines[1]
    (found,) = [one for one in ranks.events("started") if one["what"] == "engine server 1"]
    gpu = read_variable(found["pid"], VISIBLE)
    os.kill(found[which], signal.SIGKILL)
    await until(lambda: not second.serving, stretch(20))
    await until(lambda: second.serving, stretch(40))
    (again,) = ranks.events("started again")
    assert (again["host"] == found["host"]) == (which == "pid")
    assert (again["node"], read_variable(again["pid"], VISIBLE)) == (found["node"], gpu)


async def test_one_over_two_gpus_has_those_of_two_ranks_of_a_node(nodes: Nodes, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, servers=1, gpus=2)
    await ranks.open()
    try:
        (started,) = ranks.events("started")
        two = ranks.find_gpus()[:2]
        assert {node for node, _ in two} == {started["node"]}, "ranks of one node follow each other"
        assert read_variable(started["pid"], VISIBLE) == "0,1" == ",".join(sorted(gpu for _, gpu in two))
    finally:
        await ranks.close()
