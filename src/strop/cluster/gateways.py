"""Gateway workers on nodes: agents there ask one of them, and the turns come back here over its connection.

    agents on node A ──HTTP──▶ gateway 0 on node A ─┐
    agents on node B ──HTTP──▶ gateway 1 on node B ─┴─TCP──▶ this command: store, engines

A host listens at its node's address and starts the worker; a worker that died is started again by the same host, so
its address stays, and clients that come meanwhile wait. A host that is gone is placed again, at the same port if it is
on the same node. Pools that used one which stays away, or is elsewhere by then, are given another.

Which gateway answers does not matter for what is recorded (gateway/keeper.py). A worker that cannot be reached and is
still alive can neither record nor answer: its connection is closed on this side first.

Limits: `gateway.in_flight` is shared out, an equal part for each of them and one for this command's own gateway;
`gateway.in_flight_per_attempt` is counted where an attempt asks.

Left out: requests with the run's own key, which this command answers at its address; outside models; a pool that was
given no gateway, since none was up, asks this command until it is started again.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from strop.cluster.calls import PREFER_SECONDS, ask, end_actor, find_cause
from strop.cluster.connection import import_part
from strop.cluster.hosts import GatewayHost, HostPlace
from strop.cluster.journal import Journal
from strop.cluster.listener import ChildListener
from strop.cluster.plan import ClusterNode
from strop.config import Config
from strop.engines.base import Engine
from strop.errors import ConfigError, EngineError, LearnerDied, PlaceError
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerKeeper, WorkerOrder
from strop.gateway.worker import WorkerSetup
from strop.gateway.worker_process import EncodedStore, StartedWorker, WorkerProcess, describe_end
from strop.net.hosts import is_loopback

START_SECONDS = 60.0
"""Seconds in which a host must have started its process, and that must have connected."""
ASK_SECONDS = 5.0
"""Seconds that a host may take to say how its process is; then it counts as out of reach."""
AWAY = 10.0
"""Seconds after which pools whose gateway is away are given another."""
AGAIN = 2.0


class GatewaySite:
    """Where one gateway is, from one host to the next. `url` is its address, once it has had one."""

    def __init__(self, number: int, node: ClusterNode) -> None:
        self.name, self.node = f"gateway {number}", node.id
        self.host: Any = None
        self.there: HostPlace | None = None
        self.url = ""
        self.lost = 0.0  # since when it has no worker; 0: it has one, or is about to have its first


class NodeWorker(StartedWorker):
    """A worker whose process a host on a node has started."""

    def __init__(self, gateways: NodeGateways, site: GatewaySite, pid: int, calls: socket.socket) -> None:
        self.calls, self.pid, self.site = calls, pid, site
        self._gateways, self._host = gateways, site.host

    def reaches(self, url: str) -> bool:
        """At its own loopback address there may be another server."""
        return not is_loopback(urlsplit(url).hostname or "")

    async def wait(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while True:
            try:
                code: int | None = await ask(self._host.poll.remote(), ASK_SECONDS)
            except self._gateways.lost_errors:
                self._gateways.drop(self.site)
                return "its host is gone"
            if code is not None:
                return describe_end(code)
            if time.monotonic() > deadline:
                return ""
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """With its host, where that does not say that it is done."""
        try:
            await ask(self._host.signal.remote(int(signal.SIGKILL)), ASK_SECONDS)
            ended = await self.wait(ASK_SECONDS)
        except self._gateways.lost_errors:
            ended = ""
        if not ended:
            self._gateways.drop(self.site)


class NodeGateways(WorkerKeeper):
    """Of one opening of a run. `nodes` are where they go first."""

    fix = "see its log, or set cluster.gateways=0; then resume"

    def __init__(
        self,
        ray: Any,
        config: Config,
        nodes: Sequence[ClusterNode],
        listener: ChildListener,
        journal: Journal,
        gateway: Gateway,
        store: EncodedStore,
        engines: Mapping[str, Engine],
        order: WorkerOrder,
    ) -> None:
        super().__init__(gateway, store, engines, len(nodes), order)
        self.lost_errors = (ray.exceptions.RayError, TimeoutError)
        self._ray, self._config, self._listener, self._journal = ray, config, listener, journal
        self._sites = [GatewaySite(number, node) for number, node in enumerate(nodes)]
        self._users: dict[str, str] = {}  # by runner pool, the address that it was given

    # -- for runner pools ------------------------------------------------------------------------------------------

    def choose(self, pool: str, node: str) -> str:
        """The address for agents of a pool on a node: there if one is, otherwise where fewest pools are; nothing where
        none is up."""
        self._users.pop(pool, None)
        up = [site for place, site in enumerate(self._sites, 1) if place in self._workers]
        users = list(self._users.values())
        best = min(up, key=lambda site: (site.node != node, users.count(site.url), site.name), default=None)
        if best is None:
            return ""
        self._users[pool] = best.url
        return best.url

    def answers(self, url: str) -> bool:
        """Whether there is a gateway at an address, or will be in a moment."""
        site = next((site for site in self._sites if site.url == url), None)
        return site is not None and (not site.lost or time.monotonic() - site.lost < AWAY)

    # -- processes -------------------------------------------------------------------------------------------------

    def find_log(self, place: int) -> Path:
        return Path(self._config.folder).absolute() / f"gateway-{place - 1}.log"

    async def spawn(self, setup: WorkerSetup) -> NodeWorker:
        site = self._sites[setup.place - 1]
        host = site.host or await self._place(site)
        assert site.there is not None, "it has a host"
        number, key = self._listener.expect()
        setup = msgspec.structs.replace(setup, host=site.there.address)
        given = self._listener.address, number, key, pickle.dumps(setup), str(setup.log)
        try:
            pid: int = await ask(host.start.remote(*given), START_SECONDS)
            connection = await asyncio.to_thread(self._listener.take, number, START_SECONDS)
        except (*self.lost_errors, LearnerDied) as error:
            self.drop(site)
            raise EngineError(f"{site.name} could not be started: {find_cause(error)}") from None
        with connection:
            calls = socket.socket(fileno=os.dup(connection.fileno()))
        return NodeWorker(self, site, pid, calls)

    async def _place(self, site: GatewaySite) -> Any:
        """A host for it: where the last one was, if that is there. Raises `PlaceError` where there is no room at first;
        later it is waited for."""
        cpus, told = self._config.cluster.gateway_cpus, False
        deadline = time.monotonic() + self._config.cluster.timeout
        affinity = import_part("util.scheduling_strategies").NodeAffinitySchedulingStrategy
        where, limit = affinity(site.node, soft=True), PREFER_SECONDS
        while site.host is None:
            kind = self._ray.remote(GatewayHost)
            host = kind.options(num_cpus=cpus, max_restarts=0, scheduling_strategy=where).remote()
            try:
                there: HostPlace = await ask(host.describe.remote(), limit)
                port = urlsplit(site.url).port or 0 if there.node == site.node else 0
                site.url = await ask(host.listen.remote(port), ASK_SECONDS)
                site.host, site.there, site.node = host, there, there.node
            except self.lost_errors as error:
                if not site.url and time.monotonic() >= deadline:  # before, a node was lost on which it was placed
                    raise PlaceError(
                        f"the cluster has no room now for {site.name} of {cpus} CPUs, which others use. Fix: see "
                        "`ray status`, wait for them, or raise cluster.timeout"
                    ) from None
                if not told:
                    self._journal.write("waits", site.name, why=f"it could not be placed: {type(error).__name__}")
                told = True
            finally:
                if site.host is not host:
                    end_actor(self._ray, host)
            where, limit = "SPREAD", self._config.cluster.timeout
            if site.host is None:
                await asyncio.sleep(AGAIN)
        return site.host

    def note_start(self, worker: WorkerProcess) -> None:
        site, again = self._sites[worker.setup.place - 1], worker.setup.epoch > 1
        assert site.there is not None
        site.lost = 0.0
        self._journal.write_start(site.name, site.there, site.host, worker.process.pid, again=again, url=site.url)

    def note_end(self, worker: WorkerProcess, how: str) -> None:
        site = self._sites[worker.setup.place - 1]
        site.lost = time.monotonic()
        self._journal.write_end("died", site.name, node=site.there.name if site.there else "", why=how)

    async def close(self) -> None:
        await super().close()
        for site in self._sites:
            self.drop(site)

    def drop(self, site: GatewaySite) -> None:
        """The host is ended with its process, and another one is placed when it is needed."""
        host, site.host = site.host, None
        if host is not None:
            end_actor(self._ray, host)


def share_out(config: Config) -> Config:
    """The settings of each gateway of a run that has some on nodes: its part of the limits, and no workers beside it.
    Raises `ConfigError`."""
    gateway, parts = config.gateway, config.cluster.gateways + 1
    if gateway.outside:
        raise ConfigError(
            f"cluster.gateways is {parts - 1}, and gateway.outside has models, whose budgets are counted in one "
            "process. Fix: leave cluster.gateways out"
        )
    if gateway.workers not in ("auto", 1):
        raise ConfigError(
            f"cluster.gateways is {parts - 1}, and gateway.workers is {gateway.workers}: gateways are either on nodes "
            "or beside the run. Fix: leave one of them out"
        )
    if gateway.in_flight < parts:
        raise ConfigError(
            f"gateway.in_flight is {gateway.in_flight}, and {parts} gateways share it. Fix: raise it to {parts} or more"
        )
    own = msgspec.structs.replace(gateway, workers=1, in_flight=gateway.in_flight // parts)
    return msgspec.structs.replace(config, gateway=own)
