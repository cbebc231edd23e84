"""Workers are kept alive, or it is said why not; none is left behind by who gives up in the middle."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strop.engines.direct_line import LineHolder
from strop.engines.scripted import Scripted
from strop.errors import EngineError
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerKeeper, WorkerOrder
from strop.gateway.relay import RelayedEngine
from strop.gateway.worker import Front, GatewayWorker, WorkerSetup, WorkerStore
from strop.gateway.worker_process import StartedWorker, WorkerProcess
from strop.net.link import ProcessLink
from strop.store.sqlite import SqliteStore
from tests.unit.engines.test_vllm import until

pytestmark = pytest.mark.timeout(30)


class Keeper(WorkerKeeper):
    fix = "look"

    def __init__(self, store: SqliteStore) -> None:
        none: Any = None
        super().__init__(none, store, {}, 1, WorkerOrder(make=none))

    async def spawn(self, setup: WorkerSetup) -> StartedWorker:
        raise OSError("too many open files")


class Silent(StartedWorker):
    """One that does not end by itself."""

    def __init__(self, calls: socket.socket) -> None:
        self.calls, self.pid, self.killed = calls, 1, False

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(60)
        return ""

    async def kill(self) -> None:
        self.killed = True


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[Keeper]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    yield Keeper(store)
    await store.close()


async def test_what_nobody_thought_of_is_told_rather_than_waited_for(keeper: Keeper) -> None:
    keeper.start()
    with pytest.raises(EngineError, match=r"could not be started: OSError: too many open files\. Fix: look"):
        await asyncio.wait_for(keeper.open(), 10)
    await keeper.close()


async def test_a_worker_is_killed_though_who_ends_it_gives_up(keeper: Keeper) -> None:
    none: Any = None
    setup = WorkerSetup(place=1, num_workers=1, epoch=1, make=none, given=None, host="")
    ours, theirs = socket.socketpair()
    process, worker = Silent(ours), WorkerProcess(keeper, setup)
    starting = asyncio.create_task(worker.start(process))
    far = await ProcessLink.open(theirs, {})
    far.send("ready", (1,))
    await starting
    far.close()
    await worker.gone.wait()
    ending = asyncio.create_task(worker.end("is gone"))
    await asyncio.sleep(0.05)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert process.killed


class Nowhere(Front):
    """No client comes from there."""

    async def open(self, gateway: Gateway, setup: WorkerSetup, store: WorkerStore) -> None: ...

    async def close(self) -> None: ...


class Changing(Scripted):
    """An engine whose server may be another one after a while."""

    holds = False
    lines: LineHolder | None = None

    @property
    def holds_to_schemas(self) -> bool:
        return self.holds

    def lend(self, holder: LineHolder) -> None:
        self.lines = holder


async def test_workers_know_what_engines_hold_to_now(tmp_path: Path, keeper: Keeper) -> None:
    none: Any = None
    engine = Changing([], none)
    keeper.engines = {"p": engine}
    setup = WorkerSetup(place=1, num_workers=1, epoch=1, make=none, given=None, host="")
    ours, theirs = socket.socketpair()
    process, worker = WorkerProcess(keeper, setup), GatewayWorker(setup, Nowhere())
    starting = asyncio.create_task(process.start(Silent(ours)))
    far = await ProcessLink.open(theirs, worker._handlers())
    far.send("ready", (1,))
    await starting
    keeper._workers[1] = process
    keeper._up.set()
    route = RelayedEngine(worker._relay, "p")
    engine.holds = True
    await keeper.open()
    await until(lambda: route.holds_to_schemas)
    assert route.context == engine.context
    assert engine.lines is not None
    engine.holds = False
    engine.lines.tell(None)
    await until(lambda: not route.holds_to_schemas)
    far.close()
    await process.gone.wait()
