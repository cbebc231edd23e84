"""Engines whose servers are on nodes of a real Ray cluster, with a stand-in for vLLM: whoever is killed, requests are
answered and the version is served again; nothing is left behind."""

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
from strop.cluster.hosts import HostPlace
from strop.cluster.journal import Journal
from strop.cluster.meter import LoadMeter
from strop.cluster.plan import ServerDemand
from strop.cluster.probe import list_nodes
from strop.cluster.servers import ServerHosts, ServerShare
from strop.config import ClusterConfig, EngineConfig
from strop.engines import remote
from strop.engines.base import Engine, EngineSetup
from strop.engines.gpus import place_replicas
from strop.engines.vllm.engine import Vllm
from strop.errors import EngineError, PlaceError
from strop.gateway.replicas import Replicas
from strop.monitor.console import Silent
from strop.types import Sampling
from strop.weights.files import FolderTransfer
from strop.weights.publisher import Publisher
from tests.integration.cluster.nodes import Nodes, find_processes
from tests.limits import stretch
from tests.runs import alive
from tests.unit.engines.test_vllm import HANGS, Stand, until

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(1, 1)
    with join_cluster(nodes.address):
        yield nodes
    nodes.close()


class Servers:
    """Two replicas, each on a node of its own."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.folder, self.nodes, self.stand = folder, nodes, Stand(folder)
        self.hosts = self.make_hosts()
        for number in (1, 2):
            (folder / f"replica-{number}").mkdir()

    def make_hosts(self, timeout: float = 20.0) -> ServerHosts:
        journal = Journal(self.folder, Silent())
        return ServerHosts(import_ray(), ClusterConfig(timeout=timeout), journal)

    async def place(self) -> list[HostPlace]:
        places = await open_hosts(self.hosts, 2)
        config = EngineConfig(name="vllm", replicas=2, vllm=self.stand.settings)
        made = EngineSetup(model=self.stand.model, config=config, folder=self.folder, renewed=True, servers=self.hosts)
        self.engines: list[Any] = [Vllm.make(one) for one in place_replicas(made, beside_learner=True)]
        self.engine = Replicas(self.engines)
        self.publisher = Publisher(self.engine, FolderTransfer(self.stand.root))
        return places

    async def open(self) -> None:
        await self.place()
        await self.engine.start()
        self.stand.offer("1.1", 0.5)
        await self.publisher.publish("1.1")

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "cluster.jsonl").read_text().splitlines()]
        return sorted((line for line in lines if line["event"] == event), key=lambda line: line["what"])


async def open_hosts(hosts: ServerHosts, count: int, seconds: float = 30.0) -> list[HostPlace]:
    nodes = [node for node in list_nodes(import_ray()) if node.cpus][:count]
    deadline = time.monotonic() + seconds
    return await asyncio.to_thread(hosts.open, [ServerDemand(count=count)], nodes, [], deadline, threading.Event())


@pytest.fixture
async def servers(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Servers]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    servers = Servers(nodes, tmp_path)
    await servers.open()
    yield servers
    await servers.engine.close()
    servers.hosts.close()


def read_command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def ask(engine: Engine, prompt: list[int]) -> set[str]:
    """The versions that answered."""
    chunks = engine.generate(prompt, Sampling(max_tokens=2), stop_ids=[])
    return {chunk.version async for chunk in chunks}


async def test_each_is_on_a_node_of_its_own_and_listens_there_only(servers: Servers) -> None:
    started = servers.events("started")
    assert [one["what"] for one in started] == ["engine server 0", "engine server 1"]
    assert len({one["node"] for one in started}) == 2
    host = servers.engines[0].url.removeprefix("http://").rpartition(":")[0]
    assert host == started[0]["node"].partition("/")[0]
    command = read_command(started[0]["pid"])
    assert command[command.index("--host") + 1] == host
    assert {version for rollout in "abcd" for version in await ask(servers.engine.of(rollout), [1, 2])} == {"1.1"}


async def test_how_busy_they_are_is_written_down(servers: Servers) -> None:
    await LoadMeter(servers.folder, servers.hosts.journal).look()
    lines = [json.loads(line) for line in (servers.folder / "processes.jsonl").read_text().splitlines()]
    started = servers.events("started")
    assert [(one["what"], one["node"], one["pid"]) for one in lines] == [
        (one["what"], one["node"], one["pid"]) for one in started
    ]
    assert all(one["memory"] > 2**20 and one["cpus"] > 0 and "gpu" not in one for one in lines)


async def test_a_host_that_is_lost_while_its_server_starts(nodes: Nodes, tmp_path: Path) -> None:
    servers = Servers(nodes, tmp_path)
    first, _ = await servers.place()
    starting = asyncio.create_task(servers.engine.start())
    await until(lambda: (tmp_path / "vllm.log").exists() or (tmp_path / "replica-1" / "vllm.log").exists())
    os.kill(first.pid, signal.SIGKILL)
    try:
        await starting
        assert await ask(servers.engine, [1, 2]) == {"1.0"}
        (died,) = servers.events("died")
        assert (died["what"], died["why"]) == ("engine server 0", "its host was lost as it started")
        assert [one["what"] for one in servers.events("started")] == ["engine server 0", "engine server 1"]
    finally:
        await servers.engine.close()
        servers.hosts.close()
    await until(lambda: find_processes(tmp_path) == [], stretch(10))


@pytest.mark.parametrize("which", ["pid", "host"])
async def test_one_that_is_killed_is_started_again_while_the_other_answers(servers: Servers, which: str) -> None:
    first = servers.engines[0]
    servers.engine._homes.settle("a", servers.engine._replicas[0])
    hanging = asyncio.create_task(ask(servers.engine.of("a"), [1, HANGS]))
    await asyncio.sleep(0.3)
    (found,) = [one for one in servers.events("started") if one["what"] == "engine server 0"]
    os.kill(found[which], signal.SIGKILL)
    with pytest.raises(EngineError, match="in the middle of an answer"):
        await hanging
    await until(lambda: not first.serving, stretch(10))
    assert await ask(servers.engine.of("b"), [1, 2]) == {"1.1"}
    await until(lambda: first.serving, stretch(40))
    assert first.version == "1.1"
    assert [chunk.logprobs async for chunk in first.generate([1, 2], Sampling(max_tokens=1), stop_ids=[])] == [[-0.503]]
    (again,), (died,) = servers.events("started again"), servers.events("died")
    assert again["what"] == died["what"] == "engine server 0"
    assert (again["host"] == found["host"]) == (which == "pid")
    assert len(find_processes(servers.folder)) == 4, "each server has a process of its own below it"
    servers.stand.offer("1.2", 0.25)
    await servers.publisher.publish("1.2")
    assert {one.version for one in servers.engines} == {"1.2"}


async def test_a_node_is_lost_and_its_server_goes_to_another(servers: Servers, nodes: Nodes) -> None:
    (found,) = [one for one in servers.events("started") if one["what"] == "engine server 1"]
    lost = found["node"].rpartition("/")[2]
    nodes.remove(next(node for node in nodes.added if node.node_id.startswith(lost)))
    await until(lambda: not servers.engines[1].serving, stretch(30))
    servers.stand.offer("1.2", 0.25)
    async with asyncio.timeout(stretch(5)):  # the loop does not wait for it
        await servers.publisher.publish("1.2")
    assert await ask(servers.engine.of("b"), [1, 2]) == {"1.2"}
    nodes.added.append(nodes.add(1))
    await until(lambda: servers.engines[1].serving, stretch(60))
    (again,) = servers.events("started again")
    assert again["node"] != found["node"]
    assert {one.version for one in servers.engines} == {"1.2"}
    assert len(find_processes(servers.folder)) == 4
    await until(lambda: all(not node.id.startswith(lost) for node in list_nodes(import_ray())), stretch(60))


async def test_nothing_is_left_when_it_is_closed_or_forgotten(servers: Servers) -> None:
    pids = [one[which] for one in servers.events("started") for which in ("pid", "host")]
    await servers.engines[0].close()
    servers.hosts.close()  # as when the run is given up
    await until(lambda: not any(map(alive, pids)) and not find_processes(servers.folder), stretch(20))


async def test_where_others_use_the_room_that_is_said(servers: Servers) -> None:
    others = servers.make_hosts(timeout=1.0)
    with pytest.raises(PlaceError, match="has no room now for 1 engine server of 1 CPU each, which others use"):
        await open_hosts(others, 1, seconds=1.0)
    with pytest.raises(EngineError, match=r"no node has room for it within 1 s"):
        await servers.make_hosts(timeout=1.0).take(ServerShare())
