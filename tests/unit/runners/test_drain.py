"""A runner that is told to stop: nobody has to wait for its leases to run out."""

import asyncio
import time
from pathlib import Path

from strop.run.serve import open_store_server
from strop.store.remote import HttpStore
from strop.store.sqlite import SqliteStore
from strop.types import Lease
from tests.limits import stretch
from tests.unit.runners.stand import (
    ASYNC,
    alive,
    at_work,
    enqueue,
    eventually,
    lease_renewed,
    make_pool,
    running,
    written,
)


async def test_running_agents_may_end_and_nothing_new_is_leased(store: SqliteStore, tmp_path: Path):
    go = tmp_path / "go"
    async with running(store, agents_in="threads", workers=2) as pool:
        ids = await enqueue(store, *({"do": "until", "file": str(go)} for _ in range(3)))
        await at_work(store, 2)
        draining = asyncio.create_task(pool.drain(30))
        await asyncio.sleep(0.3)
        assert not draining.done()
        go.touch()
        await asyncio.wait_for(draining, 20)
        await enqueue(store, {"do": "return"})
        await asyncio.sleep(0.3)
    first, second, third = [await store.get(id) for id in ids]
    assert (first.status, second.status) == ("succeeded", "succeeded")
    assert (third.status, third.attempts) == ("queued", 0)
    assert (await store.stats())["queued"] == 2


async def test_what_does_not_end_in_time_goes_back_to_the_queue(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "child"
    async with running(store, workers=2, lease=600) as pool:
        ids = await enqueue(store, {"do": "child", "file": str(file), "session": True}, retries={})
        await written(file)
        began = time.monotonic()
        await pool.drain(0.5)
        assert time.monotonic() - began < stretch(10)
        assert pool.counts == {"leased": 1, "interrupted": 1}
        assert await eventually(lambda: not alive(int(file.read_text())))
        assert (await store.get(ids[0])).status == "queued"
        (again,) = await store.lease("another", seconds=30)
    (first, _) = await store.attempts(ids[0])
    assert (first.cause, first.detail) == ("interrupted", "the runner was told to stop")
    assert again.attempt.number == 2


async def test_leases_are_kept_alive_while_agents_may_end(store: SqliteStore, tmp_path: Path):
    go = tmp_path / "go"
    async with running(store, agents_in="threads", workers=1, lease=3.0) as pool:
        ids = await enqueue(store, {"do": "until", "file": str(go)})
        await at_work(store, 1)
        draining = asyncio.create_task(pool.drain(30))
        await lease_renewed(store, ids[0])
        go.touch()
        await draining
    assert (await store.get(ids[0])).status == "succeeded"


async def test_whoever_asks_again_may_ask_for_less_patience(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loop", workers=1) as pool:
        await enqueue(store, {"do": "sleep", "file": str(tmp_path / "file")})
        await at_work(store, 1)
        patient = asyncio.create_task(pool.drain(600))
        await asyncio.sleep(0.1)
        assert not patient.done()
        await pool.drain(0)
        await asyncio.wait_for(patient, 10)
    assert pool.counts["interrupted"] == 1


async def test_a_pool_that_never_worked_has_nothing_to_drain(store: SqliteStore):
    pool = make_pool(store, agents_in="threads", workers=1)
    await pool.start()
    await pool.drain(10)
    await pool.close()
    assert pool.counts == {}


async def test_leases_that_were_on_their_way_go_back_too(store: SqliteStore):
    """The store has given them, but the answer is still travelling when the runner is told to stop."""

    class Slow(HttpStore):
        async def lease(self, *args, wait: float = 0.0, **kwargs) -> list[Lease]:
            leases = await super().lease(*args, wait=wait, **kwargs)
            if leases and wait:
                await asyncio.sleep(600)
            return leases

    async with open_store_server(store) as server:
        slow = await Slow.open(server.url, server.key)
        async with running(slow, agents_in="threads", workers=2, lease=600) as pool:
            ids = await enqueue(store, {"do": "return"}, {"do": "return"})
            await at_work(store, 2)
            await asyncio.wait_for(pool.drain(600), 30)
        await slow.close()
    assert [(await store.get(id)).status for id in ids] == ["queued", "queued"]
    assert [a.cause for id in ids for a in await store.attempts(id)] == ["interrupted", "interrupted"]
    assert pool.counts == {"leased": 2, "interrupted": 2}
