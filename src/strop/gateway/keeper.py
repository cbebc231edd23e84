"""Keeps gateway workers alive: starts them, watches them, and replaces those that die or hang.

    owner: WorkerKeeper ◀──rows of turns, requests for tokens──  worker 1..n
                        ───────committed, tokens──────────────▶

Where they are is for a subclass: processes of this machine behind one address (workers.py), or on the nodes of a
cluster, each at an address of its own (cluster/gateways.py).

The owner is the process that has the store and the engines; an engine's server may be asked by workers themselves
(lines.py). It writes what workers send in groups, and a worker answers its client once that is committed. A worker
that dies or hangs is killed and replaced under a higher epoch; the writes it had sent are finished first, and nothing
is taken from it after that. Its successor rebuilds sessions from the store. Attempts that had calls in flight there get
an error event, which says that it was not the agent's doing.

It does not matter for what is recorded which worker answers a call, nor whether two of them know the same attempt. A
session is made of what the store has, and an answer is given once its turn is committed: turns are numbered through an
attempt, so of two answers that were made from the same past the store takes one, and refuses the other, whose number is
taken. Who is refused drops its session, and begins with what the store has when it is asked again.

Left out: outside models, whose budgets are counted in one process; a run that has some has one gateway process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from strop.engines.base import Engine
from strop.errors import EngineError, PlaceError, StropError
from strop.gateway.app import Gateway, OtherSessions
from strop.gateway.lines import WorkerLines
from strop.gateway.worker import GatewayMaker, WorkerSetup
from strop.gateway.worker_process import HUNG, EncodedStore, StartedWorker, WorkerProcess
from strop.imports import one_line
from strop.net.link import LinkLost
from strop.store.base import Ref
from strop.types import Event

FAILURES = 5
"""Workers in a row that may die before they have served: then there is no hope."""
LOG = logging.getLogger("strop.gateway")


class WorkerOrder(Struct, frozen=True, kw_only=True):
    """What workers are made from: `make` gets `given` in each of them. They answer to the names `hosts` as well."""

    make: GatewayMaker
    given: Any = None
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()


class WorkerKeeper(OtherSessions):
    """See above. `fix` is what a user does where they cannot be kept alive."""

    fix: str

    def __init__(
        self, gateway: Gateway, store: EncodedStore, engines: Mapping[str, Engine], num_workers: int, order: WorkerOrder
    ) -> None:
        self.store, self.engines, self.num_workers = store, engines, num_workers
        self.replaced: Counter[int] = Counter()
        self._gateway, self._order = gateway, order
        self._served: tuple[dict[str, int], frozenset[str]] | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._lines: dict[str, WorkerLines] = {}
        self._up = asyncio.Event()  # all of them were up at once
        self._keepers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- where they are --------------------------------------------------------------------------------------------

    @abstractmethod
    async def spawn(self, setup: WorkerSetup) -> StartedWorker:
        """Raises `EngineError` where that fails, and `PlaceError` where it will do so again."""

    def find_log(self, place: int) -> Path | None:
        return None

    def find_workers(self, rollout: str) -> Iterable[WorkerProcess]:
        """Those that may have a session of it."""
        return list(self._workers.values())

    def tell(self, worker: WorkerProcess) -> None:
        """Say what it cannot know when it is started. Raises `LinkLost`."""
        if self._served is not None:
            worker.link.send("serve", self._served)

    def note_start(self, worker: WorkerProcess) -> None:
        """It serves from now on."""

    def note_end(self, worker: WorkerProcess, how: str) -> None:
        """It does not any more."""

    # -- their lives -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers. Clients of one that is not up yet wait."""
        places = range(1, self.num_workers + 1)
        self._keepers = [asyncio.create_task(self._keep(place), name=f"strop-worker-{place}") for place in places]
        for keeper in self._keepers:
            keeper.add_done_callback(self._end_keeper)

    async def open(self) -> None:
        """Returns once all workers answer. Raises `EngineError` or `PlaceError`."""
        self._served = self._read_engines()
        for worker in self._workers.values():
            self._tell(worker)
        if not self._lines:
            for policy, engine in self.engines.items():
                self._lines[policy] = line = WorkerLines(policy, self._workers.values, self._look_again)
                engine.lend(line)
        up = asyncio.create_task(self._up.wait())
        await asyncio.wait({up, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._failed.done():
            self._failed.result()

    def _read_engines(self) -> tuple[dict[str, int], frozenset[str]]:
        """The context of each policy's engine, and the policies whose engines hold answers to grammars."""
        held = frozenset(policy for policy, engine in self.engines.items() if engine.holds_to_schemas)
        return {policy: engine.context for policy, engine in self.engines.items()}, held

    def _look_again(self) -> None:
        """An engine's server may be another one by now."""
        if (served := self._read_engines()) != self._served:
            self._served = served
            for worker in self._workers.values():
                with contextlib.suppress(LinkLost):
                    worker.link.send("serve", served)

    async def watch(self) -> None:
        await asyncio.shield(self._failed)

    def set_server_key(self, key: str) -> None:
        """Those with an address of their own are not asked with it."""

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))

    async def _start(self, place: int, *, epoch: int) -> None:
        order = self._order
        setup = WorkerSetup(
            place=place,
            num_workers=self.num_workers,
            epoch=epoch,
            make=order.make,
            given=order.given,
            host=order.host,
            hosts=order.hosts,
            log=self.find_log(place),
        )
        worker = WorkerProcess(self, setup)
        await worker.start(await self.spawn(setup))
        self._tell(worker)
        self._workers[place] = worker
        if len(self._workers) == self.num_workers:
            self._up.set()
        self.note_start(worker)

    def _tell(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(LinkLost):  # its successor is told
            self.tell(worker)
        for line in self._lines.values():
            line.tell_worker(worker)

    async def _keep(self, place: int) -> None:
        """Replace a worker again and again, unless none of them lives long enough to serve."""
        failures = 0
        while failures < FAILURES:
            worker = self._workers.get(place)
            if worker is not None:
                since = time.monotonic()
                why = await worker.watch()
                del self._workers[place]
                self.replaced[place] += 1
                how = await worker.end(f"gateway worker {place} {why or 'is gone'}")
                LOG.warning("gateway worker %d, epoch %d, %s: it is replaced", place, worker.setup.epoch, why or how)
                self.note_end(worker, why or how)
                failures = failures + 1 if time.monotonic() - since < HUNG else 0
            try:
                await self._start(place, epoch=1 + self.replaced[place])
            except PlaceError as error:
                return self._fail(error)
            except EngineError as error:
                LOG.error("%s", error)
                failures += 1
                await asyncio.sleep(1.0)
        log = f" (its log is {self.find_log(place)})" if self.find_log(place) is not None else ""
        self._fail(EngineError(f"gateway worker {place} died {failures} times in a row{log}. Fix: {self.fix}"))

    def _end_keeper(self, keeper: asyncio.Task[None]) -> None:
        """A place without a keeper would stay empty, and its clients wait."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            LOG.error("a gateway worker cannot be kept", exc_info=error)
            self._fail(EngineError(f"a gateway worker could not be started: {one_line(error)}. Fix: {self.fix}"))

    def _fail(self, error: StropError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # nobody need be watching

    # -- what is theirs --------------------------------------------------------------------------------------------

    def forget(self, rollout: str) -> None:
        for worker in self.find_workers(rollout):
            with contextlib.suppress(LinkLost):
                worker.link.send("forget", (rollout,))

    async def wait_until_idle(self, rollout: str, attempt: int, *, limit: float = 5.0) -> None:
        waits = [worker.wait_until_idle(rollout, attempt, limit) for worker in self.find_workers(rollout)]
        await asyncio.gather(*waits)

    async def count(self) -> Counter[str]:
        """What happened in all workers that are there now."""
        calls = [worker.link.call("counts", (), dict[str, int]) for worker in self._workers.values()]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return sum((Counter(counts) for counts in found if isinstance(counts, dict)), Counter[str]())

    def tell_of_unclaimed(self, message: str) -> None:
        routes = self._gateway.routes
        routes.unclaimed = routes.unclaimed or message
        routes.missed.set()

    async def blame(self, attempts: set[Ref], why: str) -> None:
        """Say in the rollouts concerned that their calls ended through no fault of the agent."""
        data = {"source": "gateway", "code": "server_error", "status": 502, "message": f"the call ended: {why}"}
        for rollout, attempt in sorted(attempts):
            event = Event(rollout=rollout, attempt=attempt, kind="error", data=data, time=time.time())
            with contextlib.suppress(StropError):  # it is over by now
                await self.store.add_events([event])
