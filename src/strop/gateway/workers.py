"""Several gateway processes of this machine, at one address.

    client ──▶ owner, which listens ──open connection──▶ worker 1..n, by a hash of the rollout (placement.py)

Limits on requests in flight are shared by all of them, in memory that each writes a number of its own to.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import socket
import subprocess
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path

from strop.engines.base import Engine
from strop.errors import EngineError
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerKeeper, WorkerOrder
from strop.gateway.limits import InFlight
from strop.gateway.placement import OWNER, Placement
from strop.gateway.spawn import spawn_worker
from strop.gateway.worker import WorkerSetup
from strop.gateway.worker_process import EncodedStore, StartedWorker, WorkerProcess, describe_end
from strop.net.handover import ConnectionPipe, Switch


class LocalWorker(StartedWorker):
    """A process of this machine; `pipe` takes connections to it."""

    def __init__(self, process: subprocess.Popen[bytes], calls: socket.socket, pipe: ConnectionPipe) -> None:
        self.calls, self.pipe, self.pid = calls, pipe, process.pid
        self._process = process

    async def wait(self, seconds: float) -> str:
        try:
            return describe_end(await asyncio.to_thread(self._process.wait, seconds))
        except subprocess.TimeoutExpired:
            return ""

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.pipe.close()


class GatewayWorkers(WorkerKeeper, Switch):
    """The workers of a gateway, and the switch of the server that listens for them.

    workers = gateway.workers = GatewayWorkers(gateway, store, engines, 4, WorkerOrder(make=..., given=...))
    workers.start()
    server = await serve(gateway, switch=workers)
    await workers.open()
    """

    own = OWNER
    fix = "set gateway.workers=1, and resume"

    def __init__(
        self,
        gateway: Gateway,
        store: EncodedStore,
        engines: Mapping[str, Engine],
        num_workers: int,
        order: WorkerOrder,
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(gateway, store, engines, num_workers, order)
        self._log, self._environment = log, dict(environment or {})
        self._placement = Placement(store, num_workers)
        self._waiting: dict[int, list[tuple[int, bytes]]] = {}  # connections for a worker that is not there
        self._memory = os.memfd_create("strop-in-flight")
        os.ftruncate(self._memory, 8 * (num_workers + 1))
        self._slots = memoryview(mmap.mmap(self._memory, 8 * (num_workers + 1))).cast("q")
        gateway.share_limits(InFlight(self._slots, OWNER))

    @property
    def switch(self) -> Switch:
        return self

    async def close(self) -> None:
        await super().close()
        for fd, _ in (one for waiting in self._waiting.values() for one in waiting):
            os.close(fd)
        os.close(self._memory)

    # -- processes -------------------------------------------------------------------------------------------------

    async def spawn(self, setup: WorkerSetup) -> LocalWorker:
        calls, theirs = socket.socketpair()
        connections, their_connections = ConnectionPipe.make()
        with theirs, their_connections:
            files = [theirs.fileno(), their_connections.fileno(), self._memory]
            try:
                process = spawn_worker("serve_handed_over", pickle.dumps(setup), files, setup.log, self._environment)
            except OSError as error:
                calls.close()
                connections.close()
                raise EngineError(f"gateway worker {setup.place} cannot be started: {error.strerror}") from None
        return LocalWorker(process, calls, ConnectionPipe(connections, self.take_back))

    def find_log(self, place: int) -> Path | None:
        return self._log

    def find_workers(self, rollout: str) -> Iterable[WorkerProcess]:
        worker = self._workers.get(self._placement.of_rollout(rollout))
        return [] if worker is None else [worker]

    def set_server_key(self, key: str) -> None:
        self._placement.server_key = key.encode()
        for worker in self._workers.values():
            self._tell(worker)

    def tell(self, worker: WorkerProcess) -> None:
        super().tell(worker)
        if self._placement.server_key:
            worker.link.send("server_key", (self._placement.server_key,))

    def note_start(self, worker: WorkerProcess) -> None:
        for fd, data in self._waiting.pop(worker.setup.place, []):
            self._send(worker, fd, data)

    def note_end(self, worker: WorkerProcess, how: str) -> None:
        self._slots[worker.setup.place] = 0

    # -- connections -----------------------------------------------------------------------------------------------

    def find(self, head: bytes) -> int | Awaitable[int] | None:
        return self._placement.find(head)

    def hand_over(self, place: int, fd: int, data: bytes) -> None:
        if (worker := self._workers.get(place)) is not None:
            self._send(worker, fd, data)
        else:
            self._waiting.setdefault(place, []).append((fd, data))

    def take_back(self, connection: socket.socket, first: bytes) -> None:
        """One that a worker has found to be for another process."""
        self.take(connection, first)

    def _send(self, worker: WorkerProcess, fd: int, data: bytes) -> None:
        assert isinstance(worker.process, LocalWorker)
        worker.process.pipe.send(fd, data)
