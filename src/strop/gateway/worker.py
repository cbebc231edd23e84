"""One of several gateway processes: it speaks to agents, and asks the process that owns the store for everything else.

    Front ──▶ Gateway ──WorkerStore──▶ owner: turns written, with everybody's, in one commit
                 └─────RelayedEngine──▶ owner, or servers that it lends a line to: tokens (relay.py)

Its clients come by connections that are handed over to it, or to an address of its own.

It lives as long as its owner does, and dies at once with it: nothing could be recorded any more.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import pickle
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from strop.engines.base import Engine
from strop.engines.direct_line import DirectLine
from strop.errors import Unavailable
from strop.gateway.app import Gateway
from strop.gateway.limits import InFlight
from strop.gateway.placement import Placement
from strop.gateway.relay import Arrival, Relay, RelayedEngine
from strop.net.handover import ConnectionPipe, Switch
from strop.net.link import Handler, LinkLost, ProcessLink
from strop.net.process_group import die_with_parent
from strop.net.server import serve_bound, serve_handed
from strop.store.encoded_turns import TurnEncoder
from strop.types import Attempt, Event, Rollout, Turn

GatewayMaker = Callable[[Any, "WorkerParts"], Gateway]
"""A function of a module, which the worker imports."""


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """What a worker is started with. `make` gets `given`, and makes its gateway."""

    place: int
    num_workers: int
    epoch: int
    make: GatewayMaker
    given: Any
    host: str
    hosts: tuple[str, ...] = ()
    log: Path | None = None


class WorkerParts(Struct, frozen=True):
    """What a gateway in a worker is made from: its store, an engine for each policy by name, and how many requests are
    in flight in all."""

    store: WorkerStore
    engine: Callable[[str], Engine]
    in_flight: InFlight


class WorkerStore:
    """The store of the process that owns it, as far as a gateway needs it. Turns are sent as rows."""

    def __init__(self, link: ProcessLink) -> None:
        self._link = link
        self._encoder = TurnEncoder()

    async def get(self, rollout: str) -> Rollout:
        return await self._call("get", (rollout,), Rollout)

    async def attempts(self, rollout: str) -> list[Attempt]:
        return await self._call("attempts", (rollout,), list[Attempt])

    async def attempt(self, key: str) -> Attempt:
        return await self._call("attempt", (key,), Attempt)

    async def turns(self, rollout: str, *, attempt: int | None = None) -> list[Turn]:
        return await self._call("turns", (rollout, attempt), list[Turn])

    async def add_turns(self, turns: Sequence[Turn]) -> None:
        if (encoded := self._encoder.encode(turns)) is None:
            return await self._call("add_turns", (turns,), None)
        rows, drafts = encoded
        await self._call("add_encoded", (rows,), None)
        self._encoder.remember(drafts)

    async def add_events(self, events: Sequence[Event]) -> None:
        await self._call("add_events", (events,), None)

    def forget(self, rollout: str) -> None:
        self._encoder.forget(rollout)

    async def _call(self, verb: str, given: Any, gives: Any) -> Any:
        try:
            return await self._link.call(verb, given, gives)
        except LinkLost:
            raise Unavailable("the process that owns the store is gone. Fix: start the run again") from None


class WorkerSwitch(Switch):
    """A request that is not for this worker goes back to the owner, which knows the others."""

    def __init__(self, place: int, placement: Placement) -> None:
        self.own = place
        self.pipe: ConnectionPipe | None = None
        self._placement = placement

    def find(self, head: bytes) -> int | Awaitable[int] | None:
        return self._placement.find(head)

    def hand_over(self, place: int, fd: int, data: bytes) -> None:
        assert self.pipe is not None
        self.pipe.send(fd, data)


class Front(ABC):
    """Where a worker's clients come from. `in_flight` counts the requests that its limit is about."""

    in_flight: InFlight

    @abstractmethod
    async def open(self, gateway: Gateway, setup: WorkerSetup, store: WorkerStore) -> None:
        """Serve the gateway from now on."""

    @abstractmethod
    async def close(self) -> None: ...

    def take_server_key(self, key: bytes) -> None:  # noqa: B027 - only some have an owner to hand it to
        """What is asked with it is for the owner."""


class HandedConnections(Front):
    """Open connections, which the owner accepts and hands over. Limits are shared by all workers."""

    def __init__(self, setup: WorkerSetup, connections: int, memory: int) -> None:
        slots = memoryview(mmap.mmap(memory, 8 * (setup.num_workers + 1))).cast("q")
        slots[setup.place] = 0  # of the one before
        self.in_flight = InFlight(slots, setup.place)
        self._connections = socket.socket(fileno=connections)

    async def open(self, gateway: Gateway, setup: WorkerSetup, store: WorkerStore) -> None:
        self._placement = Placement(store, setup.num_workers)
        switch = WorkerSwitch(setup.place, self._placement)
        self._server = await serve_handed(gateway, switch, host=setup.host, hosts=setup.hosts, log=setup.log)
        switch.pipe = self._pipe = ConnectionPipe(self._connections, switch.take)

    def take_server_key(self, key: bytes) -> None:
        self._placement.server_key = key

    async def close(self) -> None:
        await self._server.close()
        self._pipe.close()


class OwnAddress(Front):
    """An address of its own, at which whatever is asked is answered here: sessions of any rollout are rebuilt from the
    store. Whoever listens at it, and was there before this worker, keeps the connections that come while there is none.
    """

    def __init__(self, listener: int) -> None:
        self.in_flight = InFlight()
        self._listener = socket.socket(fileno=listener)

    async def open(self, gateway: Gateway, setup: WorkerSetup, store: WorkerStore) -> None:
        self._server = await serve_bound(gateway, self._listener, host=setup.host, hosts=setup.hosts, log=setup.log)

    async def close(self) -> None:
        await self._server.close()


class GatewayWorker:
    """The worker's life."""

    def __init__(self, setup: WorkerSetup, front: Front) -> None:
        self._setup, self._front = setup, front
        self._relay = Relay()
        self._ended = asyncio.Event()
        self._gateway: Gateway | None = None

    async def run(self, calls: socket.socket) -> None:
        setup, front = self._setup, self._front
        link = self._relay.link = await ProcessLink.open(calls, self._handlers(), lost=self._end_at_once)
        self._store = store = WorkerStore(link)
        front.in_flight.tell = link.send
        parts = WorkerParts(store, lambda policy: RelayedEngine(self._relay, policy), front.in_flight)
        self._gateway = gateway = setup.make(setup.given, parts)
        await front.open(gateway, setup, store)
        told = asyncio.create_task(self._tell_of_unclaimed(gateway, link))
        gc.freeze()
        link.send("ready", (setup.epoch,))
        await self._ended.wait()
        told.cancel()
        await front.close()
        link.close()

    def _end_at_once(self) -> None:
        if not self._ended.is_set():
            os._exit(1)

    async def _tell_of_unclaimed(self, gateway: Gateway, link: ProcessLink) -> None:
        await gateway.routes.missed.wait()
        link.send("unclaimed", (gateway.routes.unclaimed,))

    # -- what the owner asks for -----------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Handler]:
        return {
            "chunks": Handler(tuple[list[Arrival]], self._relay.arrive),
            "line": Handler(tuple[str, int, DirectLine | None], self._take_line),
            "line_idle": Handler(tuple[str, int], self._wait_for_line),
            "serve": Handler(tuple[dict[str, int], frozenset[str]], self._serve),
            "server_key": Handler(tuple[bytes], self._front.take_server_key),
            "forget": Handler(tuple[str], self._forget),
            "wait_until_idle": Handler(tuple[str, int, float], self._wait_until_idle),
            "counts": Handler(tuple[()], self._counts),
            "stop": Handler(tuple[()], self._ended.set),
        }

    def _take_line(self, policy: str, replica: int, line: DirectLine | None) -> None:
        self._relay.lines_of(policy).of_replica(replica).tell(line)

    async def _wait_for_line(self, policy: str, replica: int) -> None:
        await self._relay.lines_of(policy).of_replica(replica).wait_until_idle()

    def _serve(self, contexts: dict[str, int], held: frozenset[str]) -> None:
        self._relay.contexts, self._relay.held = contexts, held

    def _forget(self, rollout: str) -> None:
        if self._gateway is not None:
            self._gateway.forget(rollout)
            self._store.forget(rollout)

    async def _wait_until_idle(self, rollout: str, attempt: int, limit: float) -> None:
        if self._gateway is not None:
            await self._gateway.wait_until_idle(rollout, attempt, limit=limit)

    def _counts(self) -> dict[str, int]:
        gateway = self._gateway
        return {} if gateway is None else {**gateway.counts, "sessions": len(gateway.sessions)}


def serve_handed_over(setup: int, calls: int, connections: int, memory: int) -> None:
    """A worker process of the owner's machine, by the numbers of the files that it was given."""
    given = _begin(setup)
    _run(given, calls, HandedConnections(given, connections, memory))


def serve_at_address(setup: int, calls: int, listener: int) -> None:
    """One that may be anywhere."""
    _run(_begin(setup), calls, OwnAddress(listener))


def _begin(setup: int) -> WorkerSetup:
    die_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with os.fdopen(setup, "rb") as file:
        return pickle.load(file)


def _run(setup: WorkerSetup, calls: int, front: Front) -> None:
    uvloop.run(GatewayWorker(setup, front).run(socket.socket(fileno=calls)))
