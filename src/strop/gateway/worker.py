"""One of several gateway processes: it speaks to agents, and asks the process that owns the store for everything else.

    connection ──handed over──▶ Gateway ──WorkerStore──▶ owner: turns written, with everybody's, in one commit
                                   └─────RelayedEngine──▶ owner: tokens, of whichever engine serves the policy
                                                └───────▶ its servers, while the owner says that they may be asked
                                                          directly: a rollout asks the same one each time

It lives as long as its owner does, and dies at once with it: nothing could be recorded any more.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import pickle
import socket
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from strop.engines.base import Chunk, Engine
from strop.engines.direct_line import DirectLine
from strop.engines.receiver import WeightSource
from strop.engines.server_events import BrokenOff
from strop.engines.vllm.line import VllmLine
from strop.errors import EngineError, StropError, Unavailable
from strop.gateway.app import Gateway
from strop.gateway.limits import InFlight
from strop.gateway.placement import Placement
from strop.net.handover import ConnectionPipe, Switch
from strop.net.link import Handler, LinkLost, ProcessLink, make_error
from strop.net.process_group import die_with_parent
from strop.net.server import serve_handed
from strop.store.encoded_turns import TurnEncoder
from strop.types import Attempt, Event, Rollout, Sampling, Task, Turn

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


class RelayedRequest(Struct, frozen=True, array_like=True):
    """A request for tokens, with what engines choose by: the rollout as far as they look at it."""

    id: int
    policy: str
    rollout: str
    group: str
    task: str
    mode: str
    prompt_ids: list[int]
    sampling: Sampling
    stop_ids: list[int]


class Arrival(Struct, frozen=True, array_like=True):
    """What came of a request: a chunk, or the error that ended it."""

    id: int
    chunk: Chunk | None = None
    error: str = ""
    message: str = ""


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


class Relay:
    """Requests for tokens on their way to the owner's engines, and what comes back."""

    def __init__(self) -> None:
        self.link: ProcessLink | None = None
        self.contexts: dict[str, int] = {}
        self.lines: defaultdict[str, dict[int, VllmLine]] = defaultdict(dict)  # to a policy's servers, by replica
        self._streams: dict[int, asyncio.Queue[Chunk | StropError]] = {}
        self._num = 0

    def begin(self, rollout: Rollout, policy: str, ids: Sequence[int], sampling: Sampling, stop: Sequence[int]) -> int:
        assert self.link is not None
        self._num += 1
        self._streams[self._num] = asyncio.Queue()
        of = rollout
        request = RelayedRequest(
            self._num, policy, of.id, of.group, of.task.id, of.mode, list(ids), sampling, list(stop)
        )
        self.link.send("generate", (request,))
        return self._num

    async def next(self, id: int) -> Chunk:
        arrival = await self._streams[id].get()
        if isinstance(arrival, StropError):
            raise arrival
        return arrival

    def end(self, id: int, *, cancel: bool) -> None:
        del self._streams[id]
        if cancel and self.link is not None:
            with suppress(LinkLost):
                self.link.send("cancel", (id,))

    def find_line(self, policy: str, rollout: Rollout | None) -> tuple[int, VllmLine] | None:
        """The line that a rollout uses, and of which replica: always the same, which knows its prefixes, and members of
        a group use all lines alike."""
        if not (lines := self.lines.get(policy)):
            return None
        place = 0 if rollout is None else zlib.crc32(rollout.group.encode()) + rollout.member
        replica = sorted(lines)[place % len(lines)]
        return replica, lines[replica]

    async def explain(self, policy: str, replica: int, error: Exception) -> EngineError:
        """What the engine says of an answer that its server broke off."""
        assert self.link is not None
        try:
            return EngineError(await self.link.call("explain", (policy, replica, str(error)), str))
        except LinkLost:
            return EngineError(str(error))

    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            if (stream := self._streams.get(arrival.id)) is not None:
                stream.put_nowait(arrival.chunk or make_error(arrival.error, arrival.message))


class RelayedEngine(Engine):
    """A policy's engine in another process. What is paused, loaded and closed is so there."""

    def __init__(self, relay: Relay, policy: str, rollout: Rollout | None = None) -> None:
        self._relay, self._policy, self._rollout = relay, policy, rollout

    @property
    def context(self) -> int:
        return self._relay.contexts.get(self._policy, 0)

    def of_rollout(self, rollout: Rollout) -> Engine:
        return RelayedEngine(self._relay, self._policy, rollout)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        found, given = self._relay.find_line(self._policy, self._rollout), False
        if found is not None and await found[1].wait_until_open():
            try:
                async with aclosing(found[1].generate(prompt_ids, sampling, stop_ids)) as chunks:
                    async for chunk in chunks:
                        given = True
                        yield chunk
                return
            except (ConnectionError, TimeoutError, BrokenOff) as error:
                if given:
                    raise await self._relay.explain(self._policy, found[0], error) from None
        async with aclosing(self._ask_owner(prompt_ids, sampling, stop_ids)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _ask_owner(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
    ) -> AsyncGenerator[Chunk]:
        rollout = self._rollout or Rollout(id="", group="", member=0, task=Task(id=""), created=0.0)
        id, done = self._relay.begin(rollout, self._policy, prompt_ids, sampling, stop_ids), False
        try:
            while not done:
                try:
                    chunk = await self._relay.next(id)
                except StropError:
                    done = True
                    raise
                done = chunk.finish is not None
                yield chunk
        finally:
            self._relay.end(id, cancel=not done)

    async def pause(self) -> None:
        raise AssertionError("engines are paused where they are")

    async def resume(self) -> None:
        raise AssertionError("engines go on where they are")

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        raise AssertionError("versions are loaded where the engine is")

    async def close(self) -> None:
        """It is closed where it is."""


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


class GatewayWorker:
    """The worker's life."""

    def __init__(self, setup: WorkerSetup, slots: memoryview) -> None:
        self._setup, self._slots = setup, slots
        self._relay = Relay()
        self._ended = asyncio.Event()
        self._gateway: Gateway | None = None

    async def run(self, calls: socket.socket, connections: socket.socket) -> None:
        setup = self._setup
        link = self._relay.link = await ProcessLink.open(calls, self._handlers(), lost=self._end_at_once)
        self._store = store = WorkerStore(link)
        self._placement = Placement(store, setup.num_workers)
        in_flight = InFlight(self._slots, setup.place, tell=link.send)
        parts = WorkerParts(store, lambda policy: RelayedEngine(self._relay, policy), in_flight)
        self._gateway = gateway = setup.make(setup.given, parts)
        switch = WorkerSwitch(setup.place, self._placement)
        server = await serve_handed(gateway, switch, host=setup.host, hosts=setup.hosts, log=setup.log)
        switch.pipe = pipe = ConnectionPipe(connections, switch.take)
        told = asyncio.create_task(self._tell_of_unclaimed(gateway, link))
        gc.freeze()
        link.send("ready", (setup.epoch,))
        await self._ended.wait()
        told.cancel()
        await server.close()
        pipe.close()
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
            "serve": Handler(tuple[dict[str, int]], self._serve),
            "server_key": Handler(tuple[bytes], self._take_server_key),
            "forget": Handler(tuple[str], self._forget),
            "wait_until_idle": Handler(tuple[str, int, float], self._wait_until_idle),
            "counts": Handler(tuple[()], self._counts),
            "stop": Handler(tuple[()], self._ended.set),
        }

    def _take_line(self, policy: str, replica: int, line: DirectLine | None) -> None:
        self._relay.lines[policy].setdefault(replica, VllmLine()).tell(line)

    async def _wait_for_line(self, policy: str, replica: int) -> None:
        if (line := self._relay.lines[policy].get(replica)) is not None:
            await line.wait_until_idle()

    def _serve(self, contexts: dict[str, int]) -> None:
        self._relay.contexts = contexts

    def _take_server_key(self, key: bytes) -> None:
        self._placement.server_key = key

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


def serve(calls: int, connections: int, memory: int, setup: int) -> None:
    """A worker process, by the numbers of the files that it was given."""
    die_with_parent()
    with os.fdopen(setup, "rb") as file:
        given: WorkerSetup = pickle.load(file)
    slots = memoryview(mmap.mmap(memory, 8 * (given.num_workers + 1))).cast("q")
    slots[given.place] = 0  # of the one before
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    uvloop.run(GatewayWorker(given, slots).run(socket.socket(fileno=calls), socket.socket(fileno=connections)))
