"""When attempts are taken for lost: not because the store, its machine or its clock were away."""

import asyncio
import time

import pytest

from strop.store.reclaim import reclaim_regularly
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task


@pytest.fixture
async def store(tmp_path):
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    await store.enqueue([Rollout(id="r.0", group="r", member=0, task=Task(id="t"), created=0.0)])
    await store.lease("w", seconds=0.01)
    await asyncio.sleep(0.02)
    yield store
    await store.close()


async def status(store: SqliteStore, *, every: float, grace: float, after: float) -> str:
    task = asyncio.create_task(reclaim_regularly(store, every, grace))
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return (await store.get("r.0")).status


async def test_a_lease_that_has_run_out_is_reclaimed(store: SqliteStore):
    assert await status(store, every=0.02, grace=0.0, after=0.5) == "queued"


async def test_runners_are_given_time_after_a_start(store: SqliteStore):
    assert await status(store, every=0.02, grace=30.0, after=0.3) == "running"


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_runners_are_given_time_after_a_jump_of_the_clock(store: SqliteStore, monkeypatch, jump: float):
    await store.heartbeat([("r.0", 1)], seconds=30)
    task = asyncio.create_task(reclaim_regularly(store, 0.1, 0.4))
    await asyncio.sleep(0.05)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    await asyncio.sleep(0.2)
    assert await store.heartbeat([("r.0", 1)], seconds=30) == []  # it is heard of again in time
    await asyncio.sleep(0.6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await store.get("r.0")).status == "running"


async def test_a_heartbeat_that_waits_with_the_reclaiming_comes_first(store: SqliteStore):
    """Both waited for a locked file: what counts is when they were said."""
    await store.heartbeat([("r.0", 1)], seconds=0.3)
    first = asyncio.create_task(store.reclaim())
    beat = asyncio.create_task(store.heartbeat([("r.0", 1)], seconds=30))
    store._writer._using.acquire()  # as long as somebody else has it
    await asyncio.sleep(0.5)
    store._writer._using.release()
    assert await first == []
    assert await beat == []
    assert (await store.get("r.0")).status == "running"
