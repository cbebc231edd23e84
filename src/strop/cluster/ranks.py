"""Learner ranks on nodes: room for them is reserved as a placement group per model, with a host in every bundle, which
starts the process when the run asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.cluster.calls import end_actor, find_cause
from strop.cluster.connection import import_part
from strop.cluster.hosts import HostPlace, RankHost
from strop.cluster.journal import Journal
from strop.cluster.listener import ChildListener
from strop.cluster.plan import Demand, count
from strop.errors import LearnerDied, PlaceError
from strop.learner.launcher import Launcher, StartedChild
from strop.learner.verbs import RankPlace

START_SECONDS = 60.0
"""Seconds in which a host must have started its process, and that must have connected."""
POLL_SECONDS = 2.0
SILENT_SECONDS = 30.0
"""Seconds after which a host that says nothing of its process counts as gone."""
GONE = -1
"""What `wait` returns of a process whose host is gone with it."""


class Reservation:
    """CPUs and GPUs for the ranks of one model and for the servers that are beside them, and a host for each rank.
    `bundles` has, for each rank, how Ray is told to place something beside it."""

    def __init__(self, ray: Any, model: int, demand: Demand) -> None:
        self._ray, self._demand, self._bundles = ray, demand, demand.list_bundles(model)
        each = [{"CPU": one.cpus, **({"GPU": one.gpus} if one.gpus else {})} for one in self._bundles]
        self.ranks = demand.ranks[model]
        self._group: Any = import_part("util.placement_group").placement_group(each, strategy="PACK")
        self.hosts: list[Any] = []
        self.places: list[HostPlace] = []
        self.bundles: list[Any] = []

    def open(self, deadline: float, given_up: threading.Event) -> None:
        """Wait for the resources, unless that is `given_up`, and start hosts. Raises `PlaceError`."""
        there = False
        while not there and time.monotonic() < deadline and not given_up.is_set():
            there = self._group.wait(timeout_seconds=min(deadline - time.monotonic(), 1.0))
        if not there:
            gpus = f" and {count(self._demand.rank_gpus, 'GPU')}" if self._demand.rank_gpus else ""
            raise PlaceError(
                f"the cluster has no room now for {count(self.ranks, 'learner rank')} of "
                f"{count(self._demand.rank_cpus, 'CPU')}{gpus} each, which others use. Fix: see `ray status`, wait for "
                "them, or raise cluster.timeout"
            )
        kind = self._ray.remote(RankHost)
        in_bundle = import_part("util.scheduling_strategies").PlacementGroupSchedulingStrategy
        for index, bundle in enumerate(self._bundles):
            self.bundles += [in_bundle(self._group, placement_group_bundle_index=index)] * bundle.ranks
        options = {"num_cpus": self._demand.rank_cpus, "num_gpus": self._demand.rank_gpus, "max_restarts": 0}
        for where in self.bundles:
            self.hosts.append(kind.options(scheduling_strategy=where, **options).remote())
        try:
            self.places = self._ray.get([host.describe.remote() for host in self.hosts], timeout=START_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise PlaceError(explain_start(error)) from None

    def find_gpus(self, ranks: Sequence[int]) -> str:
        """Those of some ranks, as CUDA names them; empty where they have none."""
        return ",".join(filter(None, (self.places[rank].gpus for rank in ranks)))

    def close(self) -> None:
        for host in self.hosts:
            end_actor(self._ray, host)
        with contextlib.suppress(Exception):
            import_part("util.placement_group").remove_placement_group(self._group)


def explain_start(error: BaseException) -> str:
    return (
        f"a node could not start its part of the run ({find_cause(error)}). Fix: see `ray status`, and its logs under "
        "/tmp/ray"
    )


class RankHandle:
    """A process on a node, as `LearnerProcess` has one."""

    def __init__(self, ray: Any, host: Any) -> None:
        self._ray, self._host = ray, host
        self._code: int | None = None
        self._gone = False
        self._silent_since: float | None = None

    def poll(self) -> int | None:
        if self._code is None and not self._gone:
            asked = time.monotonic()
            try:
                self._code = self._ray.get(self._host.poll.remote(), timeout=POLL_SECONDS)
                self._silent_since = None
            except self._ray.exceptions.GetTimeoutError:
                since = self._silent_since = self._silent_since or asked
                self._gone = time.monotonic() - since > SILENT_SECONDS
            except self._ray.exceptions.RayError:
                self._gone = True
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None and not self._gone:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a learner rank", timeout or 0.0)
            time.sleep(0.05)
        return GONE if code is None else code

    def terminate(self) -> None:
        self._host.signal.remote(int(signal.SIGTERM))

    def kill(self) -> None:
        """With its host."""
        self._gone = True
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._host)


class ClusterLauncher(Launcher):
    """Starts the processes that hold weights where room was reserved for them, in the order in which they are asked
    for."""

    def __init__(
        self, ray: Any, reservations: Sequence[Reservation], listener: ChildListener, journal: Journal
    ) -> None:
        self._ray, self._listener, self._journal = ray, listener, journal
        self._left = list(reservations)
        self._numbered = 0

    async def start(self, logs: Sequence[Path], *, meeting: Path | None = None) -> list[StartedChild]:
        reservation = self._left.pop(0)
        assert reservation.ranks == len(logs), "what was reserved is not what is asked for"
        starting = asyncio.get_running_loop().run_in_executor(None, self._start, reservation, logs)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(hang_up_on)
            raise
        except self._ray.exceptions.RayError as error:
            raise LearnerDied(f"a learner rank could not be started: {find_cause(error)}") from None

    def _start(self, reservation: Reservation, logs: Sequence[Path]) -> list[StartedChild]:
        hosts, places = reservation.hosts, reservation.places
        where = ""
        if len(hosts) > 1:
            port = self._ray.get(hosts[0].find_port.remote(), timeout=START_SECONDS)
            where = f"tcp://{places[0].address}:{port}"
        expected = [self._listener.expect() for _ in hosts]
        told = zip(hosts, expected, logs, strict=True)
        starting = [host.start.remote(self._listener.address, *one, str(log.absolute())) for host, one, log in told]
        pids = self._ray.get(starting, timeout=START_SECONDS)
        children: list[StartedChild] = []
        for index, (host, (number, _)) in enumerate(zip(hosts, expected, strict=True)):
            connection = self._listener.take(number, START_SECONDS)
            there, pid = places[index], pids[index]
            place = RankPlace(index=index, count=len(hosts), rendezvous=where, address=there.address)
            children.append(StartedChild(RankHandle(self._ray, host), connection, place))
            self._journal.write_start(f"rank {self._numbered}", there, host, pid)
            self._numbered += 1
        return children


def hang_up_on(starting: asyncio.Future[list[StartedChild]]) -> None:
    """Nobody waits any more for what was started. The processes end with their hosts, which the reservation closes."""
    if not starting.cancelled() and starting.exception() is None:
        for child in starting.result():
            child.connection.close()
