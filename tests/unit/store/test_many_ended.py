"""Many rollouts that ended: leasing and counting look at as few rows as in an empty store, whatever a planner was told
about the tables before."""

import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from strop.store import transitions
from strop.store.base import Store
from strop.store.sql import Operation, SqlStore
from strop.store.sqlite import SqliteStore
from strop.store.transitions import Db
from strop.types import Lease
from tests.postgres import Server
from tests.unit.store.test_store import rollout

MANY = 600


async def enqueue(store: Store, name: str, count: int) -> None:
    await store.enqueue([rollout(f"{name}.{n}") for n in range(count)])


async def lease(store: Store, count: int = 1) -> list[Lease]:
    return await store.lease("runner", seconds=600, count=count, token=secrets.token_hex(8))


async def end_all(store: SqlStore) -> None:
    """All that are queued or run."""

    def write(db: Db) -> None:
        db.execute("UPDATE rollouts SET status = 'succeeded' WHERE status IN ('queued', 'running')")
        db.execute("UPDATE attempts SET ended = 1.0 WHERE ended IS NULL")
        transitions.tick(db)

    await store._write(write)


async def test_what_is_open_is_counted(store: Store) -> None:
    assert await store.count_open() == {"queued": 0, "running": 0}
    await enqueue(store, "a", 7)
    taken = await lease(store, 4)
    await store.finish(taken[0].rollout.id, 1)
    await store.finish(taken[1].rollout.id, 1, cause="agent_error")
    await store.cancel([taken[2].rollout.id], detail="not wanted")
    await store.finish(taken[3].rollout.id, 1, cause="interrupted")
    await lease(store, 2)
    stats = await store.stats()
    assert await store.count_open() == {"queued": 2, "running": 2}
    assert (stats["queued"], stats["running"]) == (2, 2)


# -- SQLite ------------------------------------------------------------------------------------------------------------


async def count_instructions(db: sqlite3.Connection, verb: Callable[[], Awaitable[Any]]) -> int:
    """What SQLite's virtual machine does: it grows with every row that is looked at."""
    count = 0

    def instruction() -> None:
        nonlocal count
        count += 1

    db.set_progress_handler(instruction, 1)
    await verb()
    db.set_progress_handler(None, 1)
    return count


async def test_sqlite_does_the_same_work_before_many_and_before_none(tmp_path: Path) -> None:
    work: list[tuple[int, ...]] = []
    for ended in (0, MANY):
        store = await SqliteStore.open(tmp_path / f"{ended}.sqlite")
        await enqueue(store, "ended", ended)
        await end_all(store)
        await enqueue(store, "open", 20)
        reading = store._reader._connection
        counting, all_counts = [await count_instructions(reading, verb) for verb in (store.count_open, store.stats)]
        leasing = await count_instructions(store._db, lambda store=store: lease(store))
        work.append((leasing, counting, all_counts))
        await store.close()
    before, after = work
    assert 0 < after[0] <= before[0] + 5
    assert 0 < after[1] <= before[1] + 5
    assert after[2] > before[2] + MANY  # `stats` does look at them all, so this would show it


# -- PostgreSQL --------------------------------------------------------------------------------------------------------

READ = (
    "SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(indexrelid)), 0)::bigint"
    " FROM pg_stat_user_indexes WHERE schemaname = current_schema()"
)


@pytest.fixture
async def postgres(postgres_server: Server, request: pytest.FixtureRequest) -> AsyncIterator[SqlStore]:
    from strop.store.postgres import PostgresStore

    name = f"t{abs(hash(request.node.nodeid))}"
    store = await PostgresStore.open(postgres_server.url(name), size=1)
    yield store
    await store.close()


async def analyze(store: SqlStore) -> None:
    """As the server does by itself, some while after a table has changed."""
    await store._write(lambda db: db.execute("ANALYZE"))


async def count_entries(store: SqlStore, verb: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch) -> int:
    """The entries of indexes that a verb of one transaction walks along. Tables are never read but by an index."""
    seen = list[int]()

    def watch(run: Callable[[Operation[Any]], Awaitable[Any]]) -> Callable[[Operation[Any]], Awaitable[Any]]:
        def watched(operation: Operation[Any]) -> Awaitable[Any]:
            def both(db: Db) -> Any:
                (before,) = db.execute(READ).fetchone()
                result = operation(db)
                seen.append(db.execute(READ).fetchone()[0] - before)
                return result

            return run(both)

        return watched

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", watch(store._write))
        patch.setattr(store, "_read", watch(store._read))
        await verb()
    (entries,) = seen
    return entries


@pytest.mark.postgres
async def test_what_runs_is_not_walked_past_when_nothing_ran_at_the_last_look(
    postgres: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue(postgres, "a", MANY)
    await lease(postgres, MANY)
    await end_all(postgres)
    await postgres._write(lambda db: db.execute("UPDATE attempts SET token = NULL"))
    await analyze(postgres)  # no attempt is open and none has a token, it is told
    await enqueue(postgres, "b", MANY)
    await lease(postgres, MANY - 5)
    await lease(postgres)  # dead entries are passed once, and marked
    entries = await count_entries(postgres, lambda: lease(postgres), monkeypatch)
    assert 0 < entries < 30


@pytest.mark.postgres
async def test_what_ended_is_not_walked_past_when_all_was_queued_at_the_last_look(
    postgres: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue(postgres, "a", MANY)
    await analyze(postgres)  # any row is as good as any other, it is told
    await end_all(postgres)
    await enqueue(postgres, "b", 5)
    await lease(postgres)  # as above
    entries = await count_entries(postgres, lambda: lease(postgres, 2), monkeypatch)
    assert 0 < entries < 30


@pytest.mark.postgres
async def test_what_ended_is_not_counted(postgres: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await enqueue(postgres, "a", MANY)
    await analyze(postgres)
    await end_all(postgres)
    await enqueue(postgres, "b", 5)
    await postgres.count_open()
    entries = await count_entries(postgres, postgres.count_open, monkeypatch)
    assert 5 <= entries < 30
    entries = await count_entries(postgres, postgres.stats, monkeypatch)
    assert entries > MANY
