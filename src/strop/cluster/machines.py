"""A cluster as the machines of a run (run/machines.py): where its processes are started, and what watches over them.

Room for them is reserved for one opening of the run, and given back when that ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from strop.cluster.gateways import NodeGateways, share_out
from strop.cluster.journal import Journal
from strop.cluster.listener import ChildListener
from strop.cluster.meter import LoadMeter
from strop.cluster.placing import NodeJoined, give_back, place
from strop.cluster.pools import RunnerPools
from strop.cluster.ranks import ClusterLauncher, Reservation
from strop.cluster.servers import ServerHosts
from strop.config import Config
from strop.engines.base import Engine
from strop.errors import HeadLost, PlaceError
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerOrder
from strop.gateway.worker_process import EncodedStore
from strop.monitor.console import View
from strop.net.hosts import is_loopback
from strop.run.machines import Machines
from strop.run.prepare import PreparedPolicy
from strop.run.state import Run
from strop.run.supervise import run_beside

AGAIN = 2.0
"""Seconds between two attempts to find room again once a node is lost."""


class ClusterMachines(Machines):
    """One opening of a run on a cluster. `run` is it, once its agents may begin. `make_gateways` makes those that are
    on nodes, if there are to be some."""

    def __init__(
        self,
        launcher: ClusterLauncher,
        servers: ServerHosts,
        pools: RunnerPools | None,
        address: str,
        meter: LoadMeter,
        make_gateways: Callable[..., NodeGateways] | None = None,
    ) -> None:
        self.launcher, self.servers = launcher, servers
        self.run: Run | None = None
        self._meter = meter
        self._pools, self._address, self._make_gateways = pools, address, make_gateways
        self._gateways: NodeGateways | None = None

    def adapt(self, config: Config) -> Config:
        """Agents run elsewhere, and the run is to be reached from there."""
        if self._pools is None:
            return config
        replace = msgspec.structs.replace
        host = self._address if is_loopback(config.gateway.host) else config.gateway.host
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
        await run_beside(working, self._meter.watch())


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
            except PlaceError as error:  # a node that was lost may come back, and Ray needs a while to notice
                if not (again or isinstance(error, NodeJoined)) or time.monotonic() + AGAIN > deadline:
                    raise
                await asyncio.to_thread(give_back, reservations, servers)
                await asyncio.sleep(AGAIN)
        for line in plan.describe():
            journal.write("planned", line)
        if not again:
            view.plan(plan.describe())
        pools = RunnerPools(ray, config, address, plan.runners, journal) if plan.runners else None
        make = partial(NodeGateways, ray, config, plan.gateways, listener, journal) if plan.gateways else None
        launcher = ClusterLauncher(ray, reservations, listener, journal)
        meter = LoadMeter(Path(config.folder), journal)
        yield ClusterMachines(launcher, servers, pools, address, meter, make)
    except HeadLost:
        reservations.clear()  # they are gone with it, and whoever asked to be rid of them would wait for a minute
        servers.forget()
        raise
    finally:
        listener.close()
        await asyncio.shield(asyncio.to_thread(give_back, reservations, servers))
