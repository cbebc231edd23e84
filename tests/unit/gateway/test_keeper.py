"""Workers are kept alive, or it is said why not; none is left behind by who gives up in the middle."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strop.errors import EngineError
from strop.gateway.keeper import WorkerKeeper, WorkerOrder
from strop.gateway.worker import WorkerSetup
from strop.gateway.worker_process import StartedWorker, WorkerProcess
from strop.net.link import ProcessLink
from strop.store.sqlite import SqliteStore

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
