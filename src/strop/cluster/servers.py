"""Engines' servers on nodes: each is the child of an actor there, which has its CPUs and GPUs; the engine speaks to it
over HTTP.

    engine ──start──▶ ClusterServer ──through Ray──▶ ServerHost ──starts──▶ vLLM, at the node's address and a free port
           ──requests, weights──────────────────────HTTP──────────────────▶

Hosts are placed before the run begins. A server that dies is started again by its engine, by the host that it had. If
that is gone, with its node or by itself, another one is placed wherever there is room.

A vLLM server that sleeps while the learner works, or reads its memory (`weights = ipc`), is on the GPUs of learner
ranks: its host is in the bundle of the first of them, and there again if it is lost. A lost node takes ranks with it.

Left out: a server over the GPUs of several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from strop.cluster.calls import PREFER_SECONDS, ask, end_actor
from strop.cluster.connection import import_part
from strop.cluster.hosts import HostPlace, ServerHost, StartedServer
from strop.cluster.journal import Journal
from strop.cluster.plan import ClusterNode, ServerDemand, list_each
from strop.cluster.ranks import Reservation, explain_start
from strop.config import ClusterConfig, EngineConfig, SglangConfig, VllmConfig
from strop.engines.gpus import VISIBLE
from strop.engines.registry import engine_class, engine_name
from strop.engines.server_process import EngineServer, ExternalServer, ServerLauncher, ServerProgram
from strop.errors import ConfigError, EngineError, PlaceError

ANSWER_SECONDS = 60.0
"""Seconds that a host may take to answer, beside what it does; then it counts as lost."""
END_SECONDS = 15.0
"""The same where it only ends something."""
AGAIN = 1.0
"""Seconds between two attempts to place a host."""
HOSTS = 5
"""So many hosts of one server may be lost, one after the other, while it starts."""


class ServerShare(Struct, frozen=True):
    """What a server has of the cluster: CPUs, and so many GPUs wherever there is room, or a part of a `bundle` of
    learner ranks, and those of their GPUs that are `visible` to it."""

    cpus: int = 1
    gpus: int = 0
    bundle: Any = None
    visible: str = ""


class ServerHosts(ServerLauncher):
    """Of one opening of a run: hosts that are reserved for its servers, and those that they have."""

    elsewhere = True

    def __init__(self, ray: Any, config: ClusterConfig, journal: Journal) -> None:
        self.ray, self.journal = ray, journal
        self._config = config
        self._shares: list[ServerShare] = []  # in the order in which servers are made
        self._reserved: list[tuple[ServerShare, Any]] = []  # with the host that has it
        self._all: list[Any] = []
        self._is_closed = False
        self._numbered = 0

    def make(self, program: ServerProgram) -> ClusterServer:
        number, self._numbered = self._numbered, self._numbered + 1
        return ClusterServer(self, program, f"engine server {number}", self._shares[number])

    def open(
        self,
        wanted: Sequence[ServerDemand],
        nodes: Sequence[ClusterNode],
        ranks: Sequence[Reservation],
        deadline: float,
        given_up: threading.Event,
    ) -> list[HostPlace]:
        """A host for each server, beside ranks or on these nodes where they have room. Raises `PlaceError`."""
        self._is_closed = False
        self._shares = [find_share(one, index, ranks) for one, index in list_each(wanted)]
        in_place = import_part("util.scheduling_strategies").NodeAffinitySchedulingStrategy
        for share, node in zip(self._shares, nodes, strict=True):
            self._reserved.append((share, self._place(share, in_place(node.id, soft=True))))
        asked, elsewhere = [host.describe.remote() for _, host in self._reserved], time.monotonic() + PREFER_SECONDS
        while asked and len(ready := self.ray.wait(asked, num_returns=len(asked), timeout=1.0)[0]) < len(asked):
            if time.monotonic() > deadline or given_up.is_set():
                self.close()
                raise PlaceError(
                    f"the cluster has no room now for {' and '.join(one.describe() for one in wanted)}, which others "
                    "use. Fix: see `ray status`, wait for them, or raise cluster.timeout"
                )
            if time.monotonic() > elsewhere:
                elsewhere = math.inf
                for index in (index for index, one in enumerate(asked) if one not in ready):
                    asked[index] = self._place_elsewhere(index)
        try:
            return self.ray.get(asked)
        except self.ray.exceptions.RayError as error:
            raise PlaceError(explain_start(error)) from None

    def _place_elsewhere(self, index: int) -> Any:
        """Of a reserved host whose node others use. Returns what it is asked."""
        share, host = self._reserved[index]
        if share.bundle is None:
            self.drop(host)
            host = self._place(share, "SPREAD")
            self._reserved[index] = share, host
        return host.describe.remote()

    def _place(self, share: ServerShare, where: Any) -> Any:
        beside = share.bundle is not None
        options = {"num_cpus": share.cpus, "num_gpus": 0 if beside else share.gpus, "max_restarts": 0}
        where = share.bundle if beside else where
        host = self.ray.remote(ServerHost).options(scheduling_strategy=where, **options).remote()
        self._all.append(host)
        return host

    async def take(self, share: ServerShare) -> tuple[Any, HostPlace]:
        """A host that has as much: one that was reserved, or another one as soon as there is room. Raises
        `EngineError`."""
        while (one := next((one for one in self._reserved if one[0] == share), None)) is not None:
            self._reserved.remove(one)
            with contextlib.suppress(*self.lost):
                return one[1], await ask(one[1].describe.remote(), ANSWER_SECONDS)
            self.drop(one[1])
        deadline = time.monotonic() + self._config.timeout
        while not self._is_closed:
            host = self._place(share, "SPREAD")
            try:
                return host, await ask(host.describe.remote(), deadline - time.monotonic())
            except TimeoutError:
                self.drop(host)
                raise EngineError(
                    f"no node has room for it within {self._config.timeout:g} s. Fix: see `ray status`, add nodes, or "
                    "raise cluster.timeout"
                ) from None
            except self.ray.exceptions.RayError:  # it was placed on a node that is gone, of which Ray knows by now
                self.drop(host)
                await asyncio.sleep(AGAIN)
            except BaseException:
                self.drop(host)
                raise
        raise EngineError("the run is being closed")

    @property
    def lost(self) -> tuple[type[BaseException], ...]:
        """What is raised where a host is gone, or cannot be reached."""
        return (self.ray.exceptions.RayError, TimeoutError)

    def drop(self, host: Any) -> None:
        """With its server."""
        if host in self._all:
            self._all.remove(host)
        end_actor(self.ray, host)

    def forget(self) -> None:
        """They are gone with the cluster."""
        self._is_closed = True
        self._reserved.clear()
        self._all.clear()

    def close(self) -> None:
        """For good, unless it is opened again."""
        self._is_closed = True
        self._reserved.clear()
        for host in list(self._all):
            self.drop(host)


class ClusterServer(EngineServer):
    """A server on some node. `name` is what events call it."""

    def __init__(self, hosts: ServerHosts, program: ServerProgram, name: str, share: ServerShare) -> None:
        self.url = ""
        self._hosts, self._program, self._name, self._share = hosts, program, name, share
        self._host: Any = None
        self._place = HostPlace("", "", 0)
        self._started = 0  # times

    async def start(self) -> None:
        """Where it was, or where there is room if that host is gone."""
        try:
            started = await self._start()
        except EngineError as error:
            if self._started:  # or else the run ends with it
                self._hosts.journal.write("not started again", self._name, why=str(error))
            raise
        self.url, self._started = started.url, self._started + 1
        again = self._started > 1
        self._hosts.journal.write_start(self._name, self._place, self._host, started.pid, again=again)

    async def _start(self) -> StartedServer:
        words, env = list(self._program.command()), dict(self._program.env)
        if self._share.visible:
            env[VISIBLE] = self._share.visible
        program = msgspec.structs.replace(self._program, command=partial(list, words), env=env)
        for _ in range(HOSTS):
            if self._host is None:
                self._host, self._place = await self._hosts.take(self._share)
            where = self._place.name
            if (found := await self._start_here(program)) is not None:
                if found.error:
                    raise EngineError(found.error)
                return found
            self._hosts.journal.write("died", self._name, node=where, why="its host was lost as it started")
        raise EngineError(f"{HOSTS} hosts of {self._name} were lost as it started. Fix: see `ray status`")

    async def _start_here(self, program: ServerProgram) -> StartedServer | None:
        """None where the host is gone, which is let go of then."""
        try:
            return await ask(self._host.start.remote(program), program.timeout + ANSWER_SECONDS)
        except self._hosts.lost:
            self._let_go()
            return None

    async def wait_until_gone(self) -> str:
        """Ray tells of a host that is gone, though not at once where its machine is: then it does not answer."""
        told = asyncio.ensure_future(self._wait_for_host())
        silent = asyncio.ensure_future(
            ExternalServer(self._program.name, self.url, timeout=0, setting="").wait_until_gone()
        )
        try:
            await asyncio.wait([told, silent], return_when=asyncio.FIRST_COMPLETED)
            how = (told if told.done() else silent).result()
        finally:
            told.cancel()
            silent.cancel()
        self._hosts.journal.write_end("died", self._name, node=self._place.name, why=how)
        return how

    async def _wait_for_host(self) -> str:
        assert self._host is not None, "it was never started"
        try:
            return await ask(self._host.wait_until_gone.remote(), None)
        except self._hosts.lost:
            self._let_go()
            return f"{self._program.name} is gone with its host on {self._place.name}"

    async def end(self) -> None:
        if self._host is None:
            return
        try:
            await ask(self._host.end.remote(), END_SECONDS)
        except self._hosts.lost:
            self._let_go()

    async def close(self) -> None:
        """Its host goes when the run gives its places back."""
        await self.end()

    def _let_go(self) -> None:
        if self._host is not None:
            self._hosts.drop(self._host)
            self._host = None


def find_share(servers: ServerDemand, index: int, ranks: Sequence[Reservation]) -> ServerShare:
    """Of one of these servers."""
    if servers.beside is None:
        return ServerShare(servers.cpus, servers.gpus)
    beside = ranks[servers.beside]
    found = servers.find_ranks(index, beside.ranks)
    return ServerShare(servers.cpus, servers.gpus, beside.bundles[found[0]], beside.find_gpus(found))


def find_server_demand(
    config: EngineConfig, count: int, *, cpus: int, gpus: bool, model: int | None = None, ranks: int = 0
) -> ServerDemand | None:
    """What `count` engines with as many replicas each ask for; None where no server is started for them. `gpus`: the
    cluster has some. `model` has so many `ranks`, and is what they serve, if it is trained."""
    kind = engine_name(config)
    if engine_class(config).shares_weights:
        return None
    settings = config.sglang if kind == "sglang" else config.vllm
    if settings.url:
        return None
    refuse_devices(settings, kind)
    each = settings.tensor_parallel if gpus else 0
    servers = ServerDemand(
        count=count * config.replicas,
        cpus=cpus,
        gpus=each,
        sequences=settings.max_sequences,
        engine=kind,
        memory=settings.gpu_memory,
    )
    if kind != "vllm" or model is None or not (config.vllm.sleep or config.vllm.weights == "ipc"):
        return servers
    servers = msgspec.structs.replace(servers, beside=model, sleep=config.vllm.sleep)
    refuse_ranks(config, servers, ranks)
    return servers


def refuse_devices(settings: VllmConfig | SglangConfig, kind: str) -> None:
    if VISIBLE in settings.env:
        raise ConfigError(
            f"engine.{kind}.env sets {VISIBLE}, and on a cluster Ray gives each server its GPUs. Fix: leave it out"
        )


def refuse_ranks(config: EngineConfig, servers: ServerDemand, ranks: int) -> None:
    """What cannot be on the GPUs of so many ranks. Raises `ConfigError`."""
    settings, shared = config.vllm, config.vllm.weights == "ipc"
    needed = servers.count * settings.tensor_parallel
    if shared and settings.tensor_parallel > 1:
        raise ConfigError(
            f"engine.vllm.weights=ipc has vLLM on the learner's GPU, and engine.vllm.tensor_parallel is "
            f"{settings.tensor_parallel}. Fix: set it to 1, or engine.vllm.weights to files"
        )
    if needed > ranks and not shared:
        raise ConfigError(
            f"engine.vllm.sleep has vLLM on the GPUs of the learner, and {needed} for {servers.count} servers are "
            f"more than its {ranks}. Fix: set learner.ranks={needed}, or engine.replicas or "
            "engine.vllm.tensor_parallel lower"
        )
    on_each = math.ceil(needed / ranks)
    if on_each * settings.gpu_memory > 1:
        raise ConfigError(
            f"{on_each} vLLM servers on one GPU of the learner take {settings.gpu_memory:.0%} of its memory each. Fix: "
            f"set engine.vllm.gpu_memory to at most {math.floor(80 / on_each) / 100:g}"
        )
    if settings.weights == "nccl":
        raise ConfigError(
            "engine.vllm.sleep has vLLM on the GPUs of the learner, and engine.vllm.weights=nccl needs others. Fix: "
            "set it to files"
        )
