"""What only the SQLite backend can get wrong: files, versions, full disks, closing."""

import asyncio
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strop.errors import NewerStore, PlaceError, StoreError, Unavailable
from strop.store import schema, sqlite_writer
from strop.store.sqlite import SqliteDb, SqliteStore
from strop.types import Event, Reward, Rollout, Task


def rollouts(num: int, data: object = None) -> list[Rollout]:
    return [Rollout(id=f"g1.{i}", group="g1", member=i, task=Task(id="t", data=data), created=0.0) for i in range(num)]


async def test_what_was_written_is_there_after_opening_again(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "store.sqlite"
    store = await SqliteStore.open(path)
    await store.enqueue(rollouts(3))
    await store.close()
    store = await SqliteStore.open(path)
    assert len(await store.list()) == 3
    await store.close()


@pytest.mark.parametrize(("level", "number"), [("NORMAL", 1), ("FULL", 2)])
async def test_durability_settings(tmp_path: Path, level, number: int):
    store = await SqliteStore.open(tmp_path / "s.sqlite", synchronous=level)
    assert await store._writer.do(lambda db: db.execute("PRAGMA synchronous").fetchone()) == (number,)
    assert await store._writer.do(lambda db: db.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
    await store.close()


async def test_a_newer_store_is_refused(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    await (await SqliteStore.open(path)).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE strop SET version = ?", (schema.VERSION + 1,))
    db.close()
    with pytest.raises(NewerStore, match=r"s\.sqlite was written by a newer strop .* update strop"):
        await SqliteStore.open(path)


async def test_other_files_are_refused(tmp_path: Path):
    text = tmp_path / "notes.sqlite"
    text.write_text("not a database, but long enough to look at: " * 50)
    with pytest.raises(StoreError, match=r"notes\.sqlite is not a Strop store"):
        await SqliteStore.open(text)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(StoreError, match=r"foreign\.sqlite is a database of another program"):
        await SqliteStore.open(foreign)


@pytest.mark.parametrize("page", ["first", "later"])
async def test_a_damaged_file_is_called_so_with_a_way_out(tmp_path: Path, page: str):
    """Whether it shows when the file is opened or when it is read."""
    path, task = tmp_path / "store.sqlite", Task(id="t", data="words " * 100)
    store = await SqliteStore.open(path)
    await store.enqueue([Rollout(id=f"r{n}", group="g", member=n, task=task, created=0.0) for n in range(200)])
    await store.close()
    data = bytearray(path.read_bytes())
    damaged = range(100, 4096) if page == "first" else range(4096, len(data))
    for at in damaged:
        data[at] ^= 0x5A
    path.write_bytes(data)

    async def use() -> None:
        store = await SqliteStore.open(path)
        try:
            await store.list()
        finally:
            await store.close()

    with pytest.raises(
        StoreError, match=r"e\.sqlite is damaged \(.*malformed.*\)\. Fix: put a copy back, or .*\.recover"
    ):
        await use()


async def test_places_that_cannot_be_written_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceError, match=r"cannot make the folder .*file/below"):
        await SqliteStore.open(tmp_path / "file" / "below" / "s.sqlite")
    (tmp_path / "taken.sqlite").mkdir()
    with pytest.raises(PlaceError, match=r"cannot write .*taken\.sqlite"):
        await SqliteStore.open(tmp_path / "taken.sqlite")
    if sys.platform == "linux":
        with pytest.raises(PlaceError, match="/proc"):
            await SqliteStore.open("/proc/s.sqlite")


async def test_a_full_disk_is_a_sentence_and_loses_nothing_acknowledged(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    await store.enqueue(rollouts(1))
    await store.lease("w", seconds=30)
    pages = await store._writer.do(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await store._writer.do(lambda db: db.execute(f"PRAGMA max_page_count = {pages + 10}").fetchone())
    events = [
        Event(rollout="g1.0", attempt=1, kind="message", data={"x": "y" * 5000}, time=float(i)) for i in range(40)
    ]
    results = await asyncio.gather(*(store.add_events([event]) for event in events), return_exceptions=True)
    for event in events:
        results.append((await asyncio.gather(store.add_events([event]), return_exceptions=True))[0])
    refused = [r for r in results if r is not None]
    assert refused
    assert all(isinstance(r, StoreError) and "is full. Fix: free some space" in str(r) for r in refused)
    assert len(await store.events("g1.0")) == len(results) - len(refused)
    await store._writer.do(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone())
    await store.add_events(events)  # it goes on once there is room
    await store.close()


async def test_another_writer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite_writer, "BUSY", 0.05)
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process holds"):
        await store.enqueue(rollouts(1))
    other.execute("ROLLBACK")
    other.close()
    await store.enqueue(rollouts(1))
    await store.close()


async def test_a_locked_file_holds_up_writes_but_neither_the_loop_nor_reads(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = [asyncio.create_task(store.enqueue([rollout])) for rollout in rollouts(10)]
    for _ in range(5):
        await asyncio.sleep(0.02)
        assert await store.list() == []
    assert not any(write.done() for write in writes)
    other.execute("ROLLBACK")
    other.close()
    await asyncio.gather(*writes)
    assert [r.id for r in await store.list()] == [f"g1.{i}" for i in range(10)]  # in the order they were put
    await store.close()


async def test_the_log_does_not_grow_for_ever(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    await store.enqueue(rollouts(1))
    await store.lease("w", seconds=600)
    for n in range(3 * sqlite_writer.COPY_EVERY):
        data = {"x": "y" * 4000}
        await store.add_events([Event(rollout="g1.0", attempt=1, kind="message", data=data, time=float(n))])
    assert (tmp_path / "s.sqlite").stat().st_size > 2 * sqlite_writer.COPY_EVERY * 4000  # copied into the database
    assert (tmp_path / "s.sqlite-wal").stat().st_size < 12 * sqlite_writer.COPY_EVERY * 4000
    await store.close()


async def test_a_log_that_cannot_be_copied_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def execute(db: SqliteDb, sql: str, *rest):
        if "wal_checkpoint" in sql:
            raise sqlite3.OperationalError("disk I/O error")
        return sqlite3.Connection.execute(db, sql, *rest)

    store = await SqliteStore.open(tmp_path / "s.sqlite")
    monkeypatch.setattr(SqliteDb, "execute", execute, raising=False)
    monkeypatch.setattr(sqlite_writer, "COPY_EVERY", 3)
    for rollout in rollouts(20):
        await asyncio.wait_for(store.enqueue([rollout]), 10)
    monkeypatch.undo()
    assert len(await store.list()) == 20
    await store.close()


def test_what_a_closed_loop_left_behind_holds_up_nobody(tmp_path: Path):
    store = asyncio.run(SqliteStore.open(tmp_path / "s.sqlite"))

    async def leave() -> None:
        store._writer._here.append((lambda db: None, asyncio.get_running_loop().create_future()))
        store._writer._home = asyncio.get_running_loop()

    async def go_on() -> None:
        await asyncio.wait_for(store.enqueue(rollouts(2)), 10)
        assert len(await store.list()) == 2
        await store.close()

    asyncio.run(leave())
    asyncio.run(go_on())


async def test_close_finishes_what_is_queued_and_refuses_what_comes_after(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    writes = [asyncio.create_task(store.enqueue([rollout])) for rollout in rollouts(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    with pytest.raises(StoreError, match="is closed"):
        await store.list()
    with pytest.raises(StoreError, match="is closed"):
        await store.enqueue(rollouts(1))
    await store.close()
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    assert len(await store.list()) == 50
    await store.close()


def test_one_store_serves_several_event_loops(tmp_path: Path):
    store = asyncio.run(SqliteStore.open(tmp_path / "s.sqlite"))
    asyncio.run(store.enqueue(rollouts(2)))
    assert len(asyncio.run(store.list())) == 2
    asyncio.run(store.close())


async def test_an_operation_that_breaks_in_python_reaches_its_caller_alone(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.sqlite")
    results = await asyncio.gather(
        store.enqueue(rollouts(1)),
        store._writer.do(lambda db: 1 // 0),
        store.enqueue(rollouts(2)),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [int, ZeroDivisionError, int]
    assert len(await store.list()) == 2
    await store.close()


# -- looking up --------------------------------------------------------------------------------------------------------


async def test_a_look_waits_neither_for_the_thread_nor_in_the_loop(tmp_path: Path):
    """While a long read has the connection, a look queues up after it and the loop goes on."""
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.enqueue(rollouts(1))
    began, go = threading.Event(), threading.Event()

    def long(db: Any) -> str:
        began.set()
        assert go.wait(60)
        return "read"

    reading = asyncio.create_task(store._read(long))
    await asyncio.to_thread(began.wait, 60)
    looking = asyncio.create_task(store.get("g1.0"))
    for _ in range(10):
        await asyncio.sleep(0.01)
        assert not looking.done()
    go.set()
    assert await reading == "read"
    assert (await looking).id == "g1.0"
    await store.close()
    with pytest.raises(Unavailable, match="is closed"):
        await store.get("g1.0")


async def test_who_looks_again_and_again_leaves_others_their_turn(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.enqueue(rollouts(1))
    cancelling = asyncio.create_task(store.cancel(["g1.0"], detail="not wanted"))
    async with asyncio.timeout(60):
        while (await store.get("g1.0")).status != "cancelled":
            pass
    await cancelling
    await store.close()


async def test_a_file_that_is_held_is_waited_for_in_the_thread(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.enqueue(rollouts(1))
    held: list[bool] = []

    def look(db: Any) -> str:
        held.append(threading.current_thread() is threading.main_thread())
        if held[-1]:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorname = "SQLITE_BUSY_RECOVERY"
            raise error
        return db.execute("SELECT id FROM rollouts").fetchone()[0]

    assert await store._look_up(look) == "g1.0"
    assert held == [True, False]
    await store.close()


async def test_pages_of_json_are_those_of_the_records(tmp_path: Path):
    """Also of a reward that was recorded before such were refused."""
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.enqueue(rollouts(4, data={"text": '\u2028 "quoted" \\ ü \U0001f600', "n": 1e300}))
    for number in range(3):
        await store.lease("w", seconds=60)
        await store.finish(f"g1.{number}", 1, rewards=[Reward(value=1e9), Reward(name="other", value=-0.25)])
    await store.cancel(["g1.3"], detail="a \0 b ü")
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("""UPDATE rollouts SET rewards = '[{"name":"reward","value":-2e9}]' WHERE id = 'g1.1'""")
    found = await store.list()
    assert [one.status for one in found] == ["succeeded", "failed", "succeeded", "cancelled"]
    assert found[1].cause == "bad_reward"
    assert await store.list_json() == msgspec.json.encode(found)
    assert await store.list_json(after="g1.1", limit=1) == msgspec.json.encode(found[2:3])
    assert await store.list_json(status="cancelled", newest=True) == msgspec.json.encode(found[3:])
    assert await store.list_json(mode="eval") == b"[]"
    await store.close()
