"""Several gateway processes before one store: started, watched, and replaced when they die or hang.

    client ──▶ owner, which listens ──open connection──▶ worker 1..n, by a hash of the rollout (placement.py)
                 ▲ ◀──rows of turns, requests for tokens── │
                 └──committed, tokens──────────────────────┘

The owner is the process that has the store and the engines; an engine's server may be asked by workers themselves
(lines.py). It writes what workers send in groups, and a worker answers
its client once that is committed. A worker that dies or hangs is killed and replaced under a higher epoch; the writes
it had sent are finished first, and nothing is taken from it after that. Its successor rebuilds sessions from the store.
Attempts that had calls in flight there get an error event, which says that it was not the agent's doing.

Left out: outside models, whose budgets are counted in one process; a run that has some has one gateway process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol, cast

from strop.engines.base import Chunk, Engine
from strop.errors import EngineError, Fenced, StropError
from strop.files import private
from strop.gateway.app import Gateway, OtherSessions
from strop.gateway.limits import InFlight
from strop.gateway.lines import WorkerLines
from strop.gateway.placement import OWNER, Placement
from strop.gateway.worker import Arrival, GatewayMaker, RelayedRequest, WorkerSetup
from strop.net.handover import ConnectionPipe
from strop.net.link import Handler, LinkLost, ProcessLink
from strop.net.secrets import child_environment
from strop.store.base import AttemptStore, Ref
from strop.store.encoded_turns import EncodedTurn
from strop.types import Event, Mode, Rollout, Task, Turn

PING = 2.0
"""Seconds between two looks whether a worker answers."""
HUNG = 30.0
"""Seconds after which one that does not is replaced: no request keeps a worker busy for so long."""
START = 120.0
"""Seconds that a worker may take to start."""
FAILURES = 5
"""Workers in a row that may die before they have served: then there is no hope."""
LOG = logging.getLogger("strop.gateway")


class EncodedStore(AttemptStore, Protocol):
    """A store that also takes turns which are rows already."""

    async def add_encoded(self, turns: Sequence[EncodedTurn]) -> None: ...


class WorkerProcess:
    """One worker: a process with its epoch, and what it has asked for."""

    def __init__(self, owner: GatewayWorkers, setup: WorkerSetup) -> None:
        self.setup = setup
        self._owner = owner
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._at_work: set[Ref] = set()  # attempts with calls in flight
        self._arrivals: list[Arrival] = []
        self._replaced = False
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()

    async def start(self) -> None:
        """Start the process and return once it answers. Raises `EngineError` if it does not."""
        calls, theirs = socket.socketpair()
        connections, their_connections = ConnectionPipe.make()
        self.link = await ProcessLink.open(calls, self._handlers(), lost=self.gone.set)
        self.pipe = ConnectionPipe(connections, self._owner.take_back)
        try:
            self._process = self._spawn(theirs, their_connections)
        except OSError as error:
            self.link.close()
            self.pipe.close()
            raise EngineError(f"gateway worker {self.setup.place} cannot be started: {error.strerror}") from None
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.end("did not start")
            raise

    async def _wait_until_ready(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self.ready, self.gone)]
        await asyncio.wait(waits, timeout=START, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if not self.ready.is_set():
            log = f"; its log is {self.setup.log}" if self.setup.log else ""
            raise EngineError(f"gateway worker {self.setup.place} did not start{log}")

    def _spawn(self, calls: socket.socket, connections: socket.socket) -> subprocess.Popen[bytes]:
        setup = os.memfd_create("strop-setup")
        with os.fdopen(os.dup(setup), "wb") as file:
            pickle.dump(self.setup, file)
        os.lseek(setup, 0, os.SEEK_SET)
        files = [calls.fileno(), connections.fileno(), self._owner.memory, setup]
        run = f"from strop.gateway.worker import serve; serve({', '.join(map(str, files))})"
        try:
            with calls, connections, open(self.setup.log or os.devnull, "ab", opener=private) as out:
                return subprocess.Popen(
                    [sys.executable, "-c", run],
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=child_environment() | self._owner.environment,
                    start_new_session=True,  # Ctrl-C in the terminal is the run's to handle
                )
        finally:
            os.close(setup)

    async def watch(self) -> str:
        """Returns how it ended, when it is gone or has to go."""
        while not self.gone.is_set():
            try:
                async with asyncio.timeout(HUNG):
                    await self.link.call("counts", (), dict[str, int])
            except TimeoutError:
                return f"did not answer for {HUNG:g} s"
            except LinkLost:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), PING)
        try:
            code = await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    async def end(self, why: str) -> None:
        """Nothing is taken from it any more; what it had sent is written, and its process is gone."""
        self._replaced = True
        if self.gone.is_set():  # it may be saying why
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, 2.0)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        for task in list(self._streams.values()):
            task.cancel()
        self.link.close()
        self.pipe.close()
        await self.link.wait_until_done()
        await self._owner.blame(self._at_work, why)

    async def stop(self) -> None:
        """Let it end its requests, for some seconds."""
        with contextlib.suppress(LinkLost):
            self.link.send("stop", ())
        try:
            await asyncio.to_thread(self._process.wait, 15)
        except subprocess.TimeoutExpired:
            LOG.warning("gateway worker %d did not end when it was told to", self.setup.place)
        await self.end("was told to stop")

    # -- what it asks for ----------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Handler]:
        store = self._owner.store
        return {
            "get": Handler(tuple[str], store.get),
            "attempts": Handler(tuple[str], store.attempts),
            "attempt": Handler(tuple[str], store.attempt),
            "turns": Handler(tuple[str, int | None], self._turns),
            "add_turns": Handler(tuple[list[Turn]], self._add_turns),
            "add_encoded": Handler(tuple[list[EncodedTurn]], self._add_encoded),
            "add_events": Handler(tuple[list[Event]], store.add_events),
            "generate": Handler(tuple[RelayedRequest], self._begin),
            "cancel": Handler(tuple[int], self._cancel),
            "explain": Handler(tuple[str, int, str], self._explain),
            "began": Handler(Ref, lambda *attempt: self._at_work.add(cast(Ref, attempt))),
            "ended": Handler(Ref, lambda *attempt: self._at_work.discard(cast(Ref, attempt))),
            "unclaimed": Handler(tuple[str], self._owner.tell_of_unclaimed),
            "ready": Handler(tuple[int], self._is_ready),
        }

    def _is_ready(self, epoch: int) -> None:
        assert epoch == self.setup.epoch
        self.ready.set()

    def _refuse_replaced(self) -> None:
        if self._replaced:
            raise Fenced(f"epoch {self.setup.epoch} of gateway worker {self.setup.place} is over")

    def _turns(self, rollout: str, attempt: int | None) -> Awaitable[list[Turn]]:
        return self._owner.store.turns(rollout, attempt=attempt)

    def _add_turns(self, turns: list[Turn]) -> Awaitable[None]:
        self._refuse_replaced()
        return self._owner.store.add_turns(turns)

    def _add_encoded(self, turns: list[EncodedTurn]) -> Awaitable[None]:
        self._refuse_replaced()
        return self._owner.store.add_encoded(turns)

    def _begin(self, request: RelayedRequest) -> None:
        self._refuse_replaced()
        self._streams[request.id] = task = asyncio.create_task(self._generate(request))
        task.add_done_callback(lambda _: self._streams.pop(request.id, None))

    def _explain(self, policy: str, replica: int, error: str) -> Awaitable[str]:
        return self._owner.engines[policy].explain(error, replica)

    def _cancel(self, id: int) -> None:
        if (task := self._streams.get(id)) is not None:
            task.cancel()

    async def _generate(self, asked: RelayedRequest) -> None:
        rollout = Rollout(
            id=asked.rollout,
            group=asked.group,
            member=0,
            task=Task(id=asked.task),
            mode=cast(Mode, asked.mode),
            created=0.0,
        )
        try:
            engine, finish = self._owner.engines[asked.policy].of_rollout(rollout), None
            stream = engine.generate(asked.prompt_ids, asked.sampling, stop_ids=asked.stop_ids)
            async with aclosing(cast("AsyncGenerator[Chunk]", stream)) as chunks:
                async for chunk in chunks:
                    finish = chunk.finish
                    self._send(Arrival(asked.id, chunk))
            if finish is None:
                raise EngineError("the engine's answer ended without a reason")
        except StropError as error:
            self._send(Arrival(asked.id, None, type(error).__name__, str(error)))
        except Exception as error:
            LOG.error("an engine failed", exc_info=error)
            self._send(Arrival(asked.id, None, EngineError.__name__, "the engine ran into an error of its own"))

    def _send(self, arrival: Arrival) -> None:
        """What comes up in one turn of the event loop goes out together."""
        if not self._arrivals:
            asyncio.get_running_loop().call_soon(self._flush)
        self._arrivals.append(arrival)

    def _flush(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        with contextlib.suppress(LinkLost):
            self.link.send("chunks", (arrivals,))


class GatewayWorkers(OtherSessions):
    """The workers of a gateway, and the switch of the server that listens for them.

    workers = gateway.workers = GatewayWorkers(gateway, store, engines, num_workers=4, make=..., given=...)
    workers.start()
    server = await serve(gateway, switch=workers)
    await workers.open()
    """

    own = OWNER

    def __init__(
        self,
        gateway: Gateway,
        store: EncodedStore,
        engines: Mapping[str, Engine],
        *,
        num_workers: int,
        make: GatewayMaker,
        given: Any = None,
        host: str = "127.0.0.1",
        hosts: Sequence[str] = (),
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.store, self.engines = store, engines
        self.environment = dict(environment or {})
        self.replaced: Counter[int] = Counter()
        self._gateway, self._placement = gateway, Placement(store, num_workers)
        self._make, self._given, self._host, self._hosts, self._log = make, given, host, tuple(hosts), log
        self._num_workers = num_workers
        self._contexts: dict[str, int] | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._lines: dict[str, WorkerLines] = {}
        self._waiting: dict[int, list[tuple[int, bytes]]] = {}  # connections for a worker that is not there
        self._up = asyncio.Event()  # all of them were up at once
        self._keepers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.memory = os.memfd_create("strop-in-flight")
        os.ftruncate(self.memory, 8 * (num_workers + 1))
        self._slots = memoryview(mmap.mmap(self.memory, 8 * (num_workers + 1))).cast("q")
        gateway.share_limits(InFlight(self._slots, OWNER))

    def start(self) -> None:
        """Start all workers. Connections for one that is not up yet wait."""
        places = range(1, self._num_workers + 1)
        self._keepers = [asyncio.create_task(self._keep(place), name=f"strop-worker-{place}") for place in places]

    async def open(self) -> None:
        """Returns once all workers answer. Raises `EngineError`."""
        self._contexts = {policy: engine.context for policy, engine in self.engines.items()}
        for worker in self._workers.values():
            self._tell(worker)
        if not self._lines:
            for policy, engine in self.engines.items():
                self._lines[policy] = line = WorkerLines(policy, self._find_links)
                engine.lend(line)
        up = asyncio.create_task(self._up.wait())
        await asyncio.wait({up, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._failed.done():
            self._failed.result()

    def _find_links(self) -> list[ProcessLink]:
        return [worker.link for worker in self._workers.values()]

    async def watch(self) -> None:
        await asyncio.shield(self._failed)

    def set_server_key(self, key: str) -> None:
        self._placement.server_key = key.encode()
        for worker in self._workers.values():
            self._tell(worker)

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        for fd, _ in (one for waiting in self._waiting.values() for one in waiting):
            os.close(fd)
        os.close(self.memory)

    # -- connections -----------------------------------------------------------------------------------------------

    def find(self, head: bytes) -> int | Awaitable[int] | None:
        return self._placement.find(head)

    def hand_over(self, place: int, fd: int, data: bytes) -> None:
        if (worker := self._workers.get(place)) is not None:
            worker.pipe.send(fd, data)
        else:
            self._waiting.setdefault(place, []).append((fd, data))

    def take_back(self, connection: socket.socket, first: bytes) -> None:
        """One that a worker has found to be for another process."""
        self.take(connection, first)

    # -- sessions --------------------------------------------------------------------------------------------------

    def forget(self, rollout: str) -> None:
        if (worker := self._workers.get(self._placement.of_rollout(rollout))) is not None:
            with contextlib.suppress(LinkLost):
                worker.link.send("forget", (rollout,))

    async def wait_until_idle(self, rollout: str, attempt: int, *, limit: float = 5.0) -> None:
        if (worker := self._workers.get(self._placement.of_rollout(rollout))) is not None:
            with contextlib.suppress(LinkLost, TimeoutError):
                async with asyncio.timeout(limit + PING):
                    await worker.link.call("wait_until_idle", (rollout, attempt, limit), None)

    async def count(self) -> Counter[str]:
        """What happened in all workers that are there now."""
        calls = [worker.link.call("counts", (), dict[str, int]) for worker in self._workers.values()]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return sum((Counter(counts) for counts in found if isinstance(counts, dict)), Counter[str]())

    def tell_of_unclaimed(self, message: str) -> None:
        routes = self._gateway.routes
        routes.unclaimed = routes.unclaimed or message
        routes.missed.set()

    # -- keeping them alive ------------------------------------------------------------------------------------------

    async def _start(self, place: int, *, epoch: int) -> WorkerProcess:
        setup = WorkerSetup(
            place=place,
            num_workers=self._num_workers,
            epoch=epoch,
            make=self._make,
            given=self._given,
            host=self._host,
            hosts=self._hosts,
            log=self._log,
        )
        worker = WorkerProcess(self, setup)
        await worker.start()
        self._tell(worker)
        self._workers[place] = worker
        if len(self._workers) == self._num_workers:
            self._up.set()
        for fd, data in self._waiting.pop(place, []):
            worker.pipe.send(fd, data)
        return worker

    def _tell(self, worker: WorkerProcess) -> None:
        """What it cannot know when it is started."""
        with contextlib.suppress(LinkLost):  # its successor is told
            if self._contexts is not None:
                worker.link.send("serve", (self._contexts,))
            if self._placement.server_key:
                worker.link.send("server_key", (self._placement.server_key,))
        for line in self._lines.values():
            line.tell_worker(worker.link)

    async def _keep(self, place: int) -> None:
        """Replace a worker again and again, unless none of them lives long enough to serve."""
        failures = 0
        while failures < FAILURES:
            worker = self._workers.get(place)
            if worker is not None:
                since = time.monotonic()
                how = await worker.watch()
                del self._workers[place]
                self._slots[place] = 0
                self.replaced[place] += 1
                LOG.warning("gateway worker %d, epoch %d, %s: it is replaced", place, worker.setup.epoch, how)
                await worker.end(f"gateway worker {place} {how}")
                failures = failures + 1 if time.monotonic() - since < HUNG else 0
            try:
                await self._start(place, epoch=1 + self.replaced[place])
            except EngineError as error:
                LOG.error("%s", error)
                failures += 1
                await asyncio.sleep(1.0)
        if not self._failed.done():
            log = f" (its log is {self._log})" if self._log is not None else ""
            why = f"gateway worker {place} died {failures} times in a row{log}"
            self._failed.set_exception(EngineError(f"{why}. Fix: set gateway.workers=1, and resume"))
            self._failed.exception()  # nobody need be watching

    async def blame(self, attempts: set[Ref], why: str) -> None:
        """Say in the rollouts concerned that their calls ended through no fault of the agent."""
        data = {"source": "gateway", "code": "server_error", "status": 502, "message": f"the call ended: {why}"}
        for rollout, attempt in sorted(attempts):
            event = Event(rollout=rollout, attempt=attempt, kind="error", data=data, time=time.time())
            with contextlib.suppress(StropError):  # it is over by now
                await self.store.add_events([event])
