"""What only the PostgreSQL backend can get wrong: several processes, lost servers, locks, addresses, schemas."""

import asyncio
import itertools
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from strop.errors import NewerStore, PlaceError, StoreError, StropError, Unavailable
from strop.store import schema
from strop.types import Cause, Event, Lease, Policy, Reward, Rollout, Step, Task, Turn
from tests.postgres import Server, shared
from tests.unit.store import version_3
from tests.unit.store.conversations import talk, wander

psycopg = pytest.importorskip("psycopg")
from strop.store import open_store, postgres  # noqa: E402
from strop.store.postgres import PostgresStore  # noqa: E402
from tests.limits import stretch  # noqa: E402

pytestmark = pytest.mark.postgres
Open = Callable[..., Awaitable[PostgresStore]]
CAUSES: list[Cause | None] = [None, "agent_error", "lost_runner"]
_names = (f"own{n}" for n in itertools.count())


@pytest.fixture
def server() -> Server:
    return shared()


@pytest.fixture
def name() -> str:
    """A schema nobody else has."""
    return next(_names)


@pytest.fixture
async def open(server: Server, name: str) -> AsyncIterator[Open]:
    """Opens stores in the test's schema and closes them after it."""
    opened: list[PostgresStore] = []

    async def one(url: str | None = None, **settings) -> PostgresStore:
        opened.append(await PostgresStore.open(url or server.url(name), **settings))
        return opened[-1]

    yield one
    await asyncio.gather(*(store.close() for store in opened))


@pytest.fixture
def sql(server: Server) -> Iterator[Callable]:
    """What an administrator would type."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        yield lambda query: connection.execute(query)


def rollouts(num: int, group: str = "g1", **fields) -> list[Rollout]:
    return [
        Rollout(id=f"{group}.{i}", group=group, member=i, task=Task(id="t"), created=0.0, **fields) for i in range(num)
    ]


def turn(lease: Lease, k: int, **fields) -> Turn:
    given = {
        "id": f"{lease.rollout.id}/{lease.attempt.number}/{k}",
        "prompt_ids": [1, 2, 3],
        "response_ids": [7, 8],
        "logprobs": [-0.1, -0.7],
        "versions": [(0, "1.0")],
        "finish": "stop",
        "started": float(k),
        "ended": k + 1.0,
    }
    return Turn(rollout=lease.rollout.id, attempt=lease.attempt.number, **(given | fields))


def message(lease: Lease, id: str, **fields) -> Event:
    given = {"kind": "message", "data": {"text": "hello"}, "time": 1.0}
    return Event(id=id, rollout=lease.rollout.id, attempt=lease.attempt.number, **(given | fields))


# -- several processes -------------------------------------------------------------------------------------------------


async def test_waiters_of_another_store_wake_up_at_once(open: Open):
    one, other = await open(), await open()
    leasing = asyncio.create_task(other.lease("w", seconds=30, wait=60))
    waiting = asyncio.create_task(other.wait(0, timeout=60))
    await asyncio.sleep(0.2)
    assert not leasing.done()
    assert not waiting.done()
    began = time.monotonic()
    await one.enqueue(rollouts(1))
    (lease,) = await leasing
    cursor, _ = await waiting
    assert time.monotonic() - began < stretch(10)
    while (await one.get("g1.0")).status != "succeeded":
        waiting = asyncio.create_task(other.wait(cursor, timeout=60))
        await one.finish("g1.0", lease.attempt.number)
        cursor, _ = await waiting
    assert time.monotonic() - began < stretch(20)


async def test_a_rollout_is_given_to_one_of_all_who_ask_at_once(open: Open):
    num, stores = 1000, [await open(), await open()]
    await stores[0].enqueue(rollouts(num))
    taken: list[str] = []

    async def take(store: PostgresStore, runner: str) -> None:
        while leases := await store.lease(runner, seconds=60, count=5):
            taken.extend(lease.rollout.id for lease in leases)

    await asyncio.gather(*(take(store, f"{k}.{n}") for k, store in enumerate(stores) for n in range(8)))
    assert sorted(taken) == sorted(r.id for r in rollouts(num))
    assert (await stores[0].stats())["running"] == num


async def test_the_same_token_asked_for_twice_at_the_same_time_gives_the_same_leases(open: Open):
    one, other = await open(), await open()
    await one.enqueue(rollouts(40))
    for n in range(10):
        first, second = await asyncio.gather(
            *(store.lease("w", seconds=30, count=2, token=f"t{n}") for store in (one, other))
        )
        assert sorted(lease.attempt.key for lease in first) == sorted(lease.attempt.key for lease in second)
    assert (await one.stats())["running"] == 20


async def test_a_rollout_that_was_held_and_let_go_without_a_word_is_found(open: Open, name: str, server: Server):
    store = await open()
    await store.enqueue(rollouts(1))
    with psycopg.connect(server.url()) as killed:  # a process that dies before its commit says nothing
        killed.execute(f"SELECT * FROM {name}.rollouts FOR UPDATE")
        waiting = asyncio.create_task(store.lease("w", seconds=30, wait=60))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        killed.rollback()
    assert len(await asyncio.wait_for(waiting, 30)) == 1


async def test_a_cursor_never_runs_past_a_change_that_is_still_on_its_way(open: Open):
    num, rng, statuses = 300, random.Random(1), {}
    watching, *working = [await open() for _ in range(3)]

    async def work(store: PostgresStore) -> None:
        while leases := await store.lease("w", seconds=60, count=rng.randint(1, 3), wait=1):
            for lease in leases:
                await asyncio.sleep(rng.random() * 0.005)
                await store.finish(lease.rollout.id, lease.attempt.number, cause=rng.choice(CAUSES))

    async def fill(store: PostgresStore, group: str) -> None:
        for n in range(0, num // 2, 10):
            await store.enqueue(rollouts(num // 2, group)[n : n + 10])

    tasks = [asyncio.create_task(fill(store, f"g{k}")) for k, store in enumerate(working)]
    tasks += [asyncio.create_task(work(store)) for store in working for _ in range(8)]
    cursor = 0
    while sum(status in ("succeeded", "failed") for status in statuses.values()) < num:
        cursor, found = await watching.wait(cursor, timeout=30)
        assert found, f"{num - len(statuses)} of {num} were never seen, the others as {set(statuses.values())}"
        statuses |= {r.id: r.status for r in found}
    await asyncio.gather(*tasks)
    assert statuses == {r.id: r.status for r in await watching.list()}


@pytest.mark.parametrize("held", ["attempts WHERE rollout = 'g1.1'", "rollouts WHERE id = 'g1.2'"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda store: store.reclaim(),
        lambda store: store.reclaim(everything=True),
        lambda store: store.cancel(["g1.0", "g1.1", "g1.2"], detail="d"),
        lambda store: store.finish("g1.1", 1),
    ],
)
async def test_whoever_waits_for_a_row_holds_up_nobody_else(open: Open, server: Server, name: str, held: str, verb):
    """Changes of status are counted in one row, which is locked last."""
    one, other = await open(), await open()
    await one.enqueue(rollouts(3))
    await one.lease("w", seconds=-1, count=3)
    await one.finish("g1.2", 1, cause="agent_error")
    with psycopg.connect(server.url()) as busy:
        busy.execute(f"SELECT * FROM {name}.{held} FOR UPDATE")
        waiting = asyncio.create_task(verb(one))
        await asyncio.sleep(0.3)
        await asyncio.wait_for(other.enqueue(rollouts(1, "g2")), 30)
        busy.rollback()
    await waiting


async def test_no_two_verbs_ever_wait_for_each_other(open: Open, sql: Callable):
    """16 threads of two stores say every verb about the same few rollouts. A deadlock would be undone and said again,
    but each one costs a second."""
    stores = [await open(), await open()]
    leases: list[Lease] = []
    await stores[0].put_policy(Policy(name="main", version="1.0", model="m"))

    async def say(store: PostgresStore, rng: random.Random, n: int) -> None:
        some = rng.sample(leases[-12:], min(len(leases), 4))
        ids = [lease.rollout.id for lease in some]
        verbs: list[Callable[[], Awaitable]] = [
            lambda: store.enqueue(rng.sample(rollouts(20 + n // 2), 10)),
            *[lambda: store.lease("w", seconds=rng.choice([-1, 30]), count=3)] * 3,
            lambda: store.heartbeat([(lease.rollout.id, lease.attempt.number) for lease in some], seconds=30),
            lambda: store.cancel(ids[:2], detail="not wanted"),
            *[lambda: store.reclaim(everything=rng.random() < 0.5)] * 2,
            lambda: store.add_turns([turn(lease, rng.randrange(1000)) for lease in some]),
            lambda: store.add_events([message(lease, str(rng.randrange(1000))) for lease in some]),
            lambda: store.put_policy(Policy(name="main", version="1.0", model="m")),
            lambda: store.wait(0, timeout=0),
            lambda: store.steps(),
        ]
        if some:
            verbs += [lambda: store.finish(ids[0], some[0].attempt.number, cause=rng.choice(CAUSES))] * 3
        if n > 60:
            verbs.append(lambda: store.open_lineage(after=0))
            step = Step(lineage=10**6, number=rng.randrange(9), rollouts=ids, metrics={}, time=rng.random())
            verbs.append(lambda: store.commit_step(step))
            verbs.append(lambda: store.name_checkpoint(step.lineage, step.number, "c"))
        answer = await rng.choice(verbs)()
        if isinstance(answer, list) and answer and isinstance(answer[0], Lease):
            leases.extend(answer)

    async def hammer(store: PostgresStore, seed: int) -> None:
        for n in range(1000):
            if n >= 80 and len(leases) > 100:  # how many were leased by then is chance: go on until there was work
                return
            try:
                await say(store, random.Random(seed * 1000 + n), n)
            except StoreError as error:  # fenced, unknown, consumed, recorded before
                assert "failed:" not in str(error)  # noqa: PT017

    await asyncio.gather(*(hammer(store, seed) for seed, store in enumerate(stores * 8)))
    assert len(leases) > 100
    await asyncio.gather(*(store.close() for store in stores))  # connections tell their counts when they end
    await asyncio.sleep(0.2)
    assert sql("SELECT sum(deadlocks) FROM pg_stat_database").fetchone() == (0,)


# -- lost servers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that may be stopped and killed."""
    server = Server()
    yield server
    server.close()


async def test_a_server_that_is_killed_loses_nothing_acknowledged_and_records_nothing_twice(
    own_server: Server, name: str
):
    num = 250
    stores = [await PostgresStore.open(own_server.url(name), size=4) for _ in range(2)]
    finished: dict[str, float] = {}
    progress = asyncio.Semaphore(0)

    async def fill() -> None:
        for n in range(0, num, 4):
            await stores[0].enqueue(rollouts(num)[n : n + 4])
            await asyncio.sleep(0.01)

    async def work(store: PostgresStore) -> None:
        while len(finished) < num:
            for lease in await store.lease("w", seconds=300, count=2, wait=0.5):
                await store.add_turns([turn(lease, 0)])
                await store.add_events([message(lease, "a"), message(lease, "b", kind="reward", data={"value": 2.0})])
                value = random.random()
                await store.finish(lease.rollout.id, lease.attempt.number, rewards=[Reward(name="own", value=value)])
                finished[lease.rollout.id] = value
                progress.release()

    async def break_it() -> None:
        for lose in (own_server.kill9, own_server.stop):
            for _ in range(40):
                await progress.acquire()
            await asyncio.to_thread(lose)
            await asyncio.to_thread(own_server.start)

    await asyncio.gather(fill(), break_it(), *(work(store) for store in stores * 3))
    reading = await PostgresStore.open(own_server.url(name))
    assert finished == {r.id: r.reward("own") for r in await reading.list()}
    assert len(finished) == num
    for id in finished:
        assert len(await reading.attempts(id)) == 1, "a lease was lost with its answer"
        assert [event.id for event in await reading.events(id)] == ["a", "b"]
    stats = await reading.stats()
    assert (stats["succeeded"], stats["turns"], stats["events"]) == (num, num, 2 * num)
    await asyncio.gather(*(store.close() for store in [*stores, reading]))


async def test_who_waits_hears_of_changes_after_the_server_was_away(own_server: Server, name: str):
    one, other = [await PostgresStore.open(own_server.url(name)) for _ in range(2)]
    waiting = asyncio.create_task(other.lease("w", seconds=30, wait=100))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(own_server.stop, "immediate")
    await asyncio.to_thread(own_server.start)
    await one.enqueue(rollouts(1))
    assert len(await asyncio.wait_for(waiting, 60)) == 1
    await asyncio.gather(one.close(), other.close())


async def test_patience_ends_with_a_sentence_and_the_store_goes_on_once_the_server_is_back(
    own_server: Server, name: str
):
    store = await PostgresStore.open(own_server.url(name), patience=0.5)
    await store.enqueue(rollouts(1))
    await asyncio.to_thread(own_server.stop)
    try:
        for verb in (store.enqueue(rollouts(2)), store.get("g1.0")):
            with pytest.raises(StoreError, match=rf"schema={name} does not answer .*start the server again"):
                await verb
        with pytest.raises(Unavailable, match=r"Connection refused.*\. Fix: start it"):
            await PostgresStore.open(own_server.url(name))
        waited: list[StropError] = []
        with pytest.raises(Unavailable):
            await open_store(own_server.url(name), patience=0.5, on_wait=waited.append)
        assert len(waited) == 1
        waiting = asyncio.create_task(PostgresStore.close(store))
        await asyncio.wait_for(waiting, 30)
    finally:
        await asyncio.to_thread(own_server.start)
    store = await PostgresStore.open(own_server.url(name))
    assert [r.id for r in await store.list()] == ["g1.0"]
    await store.close()


async def test_an_answer_that_is_lost_after_the_commit_does_nothing_twice(open: Open, monkeypatch: pytest.MonkeyPatch):
    store = await open()
    done = postgres._transaction
    lost: list[bool] = []

    def deaf(connection, begin: bytes, *rest):
        result = done(connection, begin, *rest)
        lost.append(begin == postgres.WRITE and not (lost and lost[-1]))  # every second time it gets through
        if lost[-1]:
            raise psycopg.OperationalError("the server closed the connection unexpectedly")
        return result

    monkeypatch.setattr(postgres, "_transaction", deaf)
    await store.put_policy(Policy(name="main", version="1.0", model="m"))
    await store.enqueue(rollouts(5))
    first, second = await store.lease("w", seconds=30, count=2)
    await store.add_turns([turn(first, 0)])
    await store.add_events([message(first, "a"), message(second, "a")])
    assert await store.heartbeat([("g1.0", 1), ("g1.1", 1)], seconds=30) == []
    assert (await store.finish("g1.0", 1, rewards=[Reward(value=1.0)])).status == "succeeded"
    assert (await store.finish("g1.1", 1, cause="lost_runner")).status == "queued"
    await store.cancel(["g1.2"], detail="not wanted")
    step = Step(lineage=1, number=1, rollouts=["g1.0"], metrics={}, time=1.0)
    await store.commit_step(step)
    assert sum(lost) == 10
    assert await store.steps() == [step]
    expected = {"queued": 3, "running": 0, "succeeded": 1, "failed": 0, "cancelled": 1}
    assert await store.stats() == expected | {"turns": 1, "events": 2, "steps": 1}
    assert [len(await store.attempts(f"g1.{i}")) for i in range(5)] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("code", ["40P01", "40001"])
async def test_what_the_server_undid_in_favour_of_another_is_done_again(open: Open, code: str):
    store, times = await open(), itertools.count(1)
    await store.enqueue(rollouts(1))
    fail = f"DO $$ BEGIN RAISE EXCEPTION 'undone' USING ERRCODE = '{code}'; END $$"
    assert await store._write(lambda db: db.execute(fail) if (n := next(times)) < 4 else n) == 4
    with pytest.raises(StoreError, match="undone"):
        await store._write(lambda db: db.execute(fail))


async def test_a_full_disk_is_a_sentence(open: Open):
    store = await open()
    full = "DO $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
    with pytest.raises(StoreError, match=r"is full\. Fix: free some space, then resume the run"):
        await store._write(lambda db: db.execute(full))


# -- the data ----------------------------------------------------------------------------------------------------------


async def test_what_is_acknowledged_is_on_the_disk(open: Open, server: Server, name: str):
    store = await open(server.url(name) + "&options=-c%20synchronous_commit%3Doff")
    for run in (store._write, store._read):
        assert await run(lambda db: db.execute("SHOW synchronous_commit").fetchone()) == ("on",)
        assert await run(lambda db: db.execute("SHOW fsync").fetchone()) == ("on",)


async def test_a_read_sees_one_view_and_cannot_write(open: Open, server: Server, name: str):
    store = await open()
    await store.enqueue(rollouts(1))

    def read(db) -> list:
        before = db.execute("SELECT count(*) FROM rollouts").fetchone()
        with psycopg.connect(server.url(), autocommit=True) as other:
            other.execute(f"DELETE FROM {name}.rollouts")
        return [before, db.execute("SELECT count(*) FROM rollouts").fetchone()]

    assert await store._read(read) == [(1,), (1,)]
    assert await store.list() == []
    with pytest.raises(StoreError, match="can only be read"):
        await store._read(lambda db: db.execute("DELETE FROM rollouts"))


async def test_rows_inserted_are_counted_and_bytes_are_bytes(open: Open):
    store = await open()
    insert = "INSERT INTO lineages VALUES (?, ?) ON CONFLICT DO NOTHING"
    many = [(n, 0) for n in (1, 2, 2, 3)]
    assert await store._write(lambda db: db.executemany(insert, many).rowcount) == 3
    assert await store._write(lambda db: db.executemany(insert, [(3, 0), (4, 0)]).rowcount) == 1
    assert await store._write(lambda db: db.executemany(insert, [(4, 0)]).rowcount) == 0
    (found,) = await store._read(lambda db: db.execute("SELECT ?", (b"\0\xff",)).fetchone())
    assert (type(found), found) == (bytes, b"\0\xff")


@pytest.mark.parametrize("odd", ["nul\0", "lone \ud800", "x" * 20_000, "% ? %s", "'; DROP TABLE rollouts; --"])
async def test_no_text_gives_more_than_a_sentence(open: Open, odd: str):
    store = await open()
    await store.enqueue(rollouts(3))
    (lease,) = await store.lease(odd, seconds=30, token=odd[:2000])
    (again,) = await store.lease("w", seconds=30, token=odd[:2000])
    assert again.attempt.key == lease.attempt.key
    assert await store.heartbeat([(odd, 1), ("g1.0", 1)], seconds=30) == [(odd, 1)]
    step = Step(lineage=1, number=1, rollouts=[], dropped={"g1.2": odd}, metrics={}, checkpoint=odd, digest=odd, time=1)
    await store.put_policy(Policy(name="main", version=odd, model=odd))
    for verb in (
        store.commit_step(step),
        store.name_checkpoint(1, 1, odd),
        store.open_lineage(after=0),
        store.get(odd),
        store.list(group=odd),
        store.list(after=odd),
        store.lease("w", seconds=30, token=odd),
        store.enqueue(rollouts(2, "g2") + rollouts(1, odd)),
        store.add_turns([turn(lease, 0, id=odd), turn(lease, 1, agent=odd, messages=[{"text": odd}])]),
        store.add_events([message(lease, odd), message(lease, "b", data={odd: odd})]),
        store.cancel(["g1.1"], detail=odd),
        store.cancel([odd], detail="d"),
        store.finish("g1.0", 1, cause="agent_error", detail=odd),
        store.put_policy(Policy(name=odd, version="1.0", model="m")),
    ):
        try:
            await verb
        except StropError as error:
            assert "failed:" not in str(error), "PostgreSQL's own words"  # noqa: PT017
    assert (await store.get("g1.0")).status == "failed"
    assert (await store.get("g1.1")).status == "cancelled"


async def test_numbers_that_do_not_fit_are_named(open: Open):
    store = await open()
    with pytest.raises(StoreError, match=r"does not fit into .*out of range"):
        await store.enqueue(rollouts(1, seed=2**63))
    with pytest.raises(StoreError, match=r"does not fit into .*out of range"):
        await store.enqueue(rollouts(2, seed=2**63))
    assert await store.list() == []
    assert await store.wait(2**70, timeout=0) == (2**70, [])


# -- opening and closing -----------------------------------------------------------------------------------------------


async def test_schemas_are_stores_of_their_own(open: Open, server: Server, name: str):
    one, other = await open(), await open(server.url(next(_names)))
    await one.enqueue(rollouts(2))
    assert (len(await one.list()), len(await other.list())) == (2, 0)
    assert len(await (await open()).list()) == 2


async def test_many_may_open_a_new_store_at_once(open: Open):
    stores = await asyncio.gather(*(open() for _ in range(6)))
    await asyncio.gather(*(store.enqueue(rollouts(1, f"g{k}")) for k, store in enumerate(stores)))
    assert len(await stores[0].list()) == 6


async def test_an_older_store_is_migrated_whole_or_not_at_all(open: Open, monkeypatch: pytest.MonkeyPatch):
    store = await open()
    await store.enqueue(rollouts(2))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    script = "ALTER TABLE rollouts ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'; -- a comment\n"
    monkeypatch.setitem(schema.MIGRATIONS, schema.VERSION - 1, (script + "UPDATE nowhere SET x = 1;",))
    with pytest.raises(StoreError, match="nowhere"):
        await open()
    assert len(await store.list()) == 2
    monkeypatch.setitem(schema.MIGRATIONS, schema.VERSION - 1, (script,))
    for newer in await asyncio.gather(open(), open()):
        found = await newer._read(lambda db: db.execute("SELECT id, colour FROM rollouts ORDER BY id").fetchall())
        assert found == [("g1.0", "red"), ("g1.1", "red")]


async def test_a_store_of_version_5_gets_the_indexes_of_a_new_one(open: Open, sql: Callable, name: str):
    def read() -> list[str]:
        return sql(f"SELECT indexdef FROM pg_indexes WHERE schemaname = '{name}' ORDER BY indexname").fetchall()

    store = await open()
    await store.enqueue(rollouts(1))
    new, place = read(), f"ON {name}.attempts (token) WHERE ended IS NULL"
    sql(f"DROP INDEX {name}.rollouts_queued; DROP INDEX {name}.attempts_token; CREATE INDEX attempts_token {place}")
    sql(f"ALTER TABLE {name}.rollouts DROP COLUMN excluded, DROP COLUMN tokens")
    sql(f"UPDATE {name}.strop SET version = 5")
    assert read() != new
    store = await open()
    assert read() == new
    assert len(await store.lease("w", seconds=30)) == 1


async def test_a_newer_store_is_refused(open: Open, sql: Callable, name: str):
    await open()
    sql(f"UPDATE {name}.strop SET version = {schema.VERSION + 1}")
    with pytest.raises(NewerStore, match=rf"schema={name} was written by a newer strop .* update strop"):
        await open()


@pytest.mark.parametrize("table", ["turns (x INT)", "strop (x INT)", "strop (version BIGINT)"])
async def test_tables_of_another_program_are_refused_and_left_alone(open: Open, sql: Callable, name: str, table: str):
    sql(f"CREATE SCHEMA {name}; CREATE TABLE {name}.{table}")
    with pytest.raises(StoreError, match=r"holds tables of another program\. Fix: choose another schema"):
        await open()
    left = sql(f"SELECT tablename FROM pg_tables WHERE schemaname = '{name}'").fetchall()
    assert left == [(table.partition(" ")[0],)]


async def test_other_tables_in_the_schema_do_not_matter(open: Open, sql: Callable, name: str):
    sql(f"CREATE SCHEMA {name}; CREATE TABLE {name}.unrelated (x INT)")
    assert await (await open()).list() == []


async def test_places_that_cannot_be_used_are_sentences(server: Server, sql: Callable, name: str):
    sql(f"CREATE USER {name}_locked PASSWORD 'right'; CREATE USER {name}_poor")
    sql(f"CREATE DATABASE {name}_latin ENCODING 'LATIN1' TEMPLATE template0")
    rules = (server.data / "pg_hba.conf").read_text()
    (server.data / "pg_hba.conf").write_text(f"host all {name}_locked 127.0.0.1/32 scram-sha-256\n{rules}")
    sql("SELECT pg_reload_conf()")
    at = f"127.0.0.1:{server.port}"
    for address, says in {
        f"strop@{at}/nowhere": "database .nowhere. does not exist.*createdb",
        f"nobody@{at}/postgres": "role .nobody. does not exist.*createuser",
        f"{name}_locked:wrong-one@{at}/postgres": "password authentication failed.*right user and password",
        f"{name}_locked@{at}/postgres": "no password supplied.*right user and password",
        f"{name}_poor@{at}/postgres?schema={name}_poor": "permission denied.*grant",
        f"strop@{at}/{name}_latin": "encoded in LATIN1. Fix: make one with ENCODING 'UTF8'",
        "strop@nowhere.invalid/postgres": "check the address and the server",
        f"strop@{at}/postgres?schema=No-Good": "'No-Good' is not the name of a schema",
        f"strop@{at}/postgres?schema=pg_own": "'pg_own' is not the name of a schema",
        f"strop@{at}/postgres?colour=red": "the address of the store cannot be read",
        "strop:wrong-o/ne@host/postgres": "the address of the store cannot be read.*%2F",
        "strop:12/wrong-one@host/postgres": "the address of the store cannot be read",
        "strop:wrong-one@wrong-one@host/postgres": "the address of the store cannot be read",
        "strop:wrong-one?@nowhere.invalid/postgres": "cannot open postgresql://nowhere.invalid:5432/postgres.schema=pub",
        "strop:wrong-one@nowhere.invalid/a?sslmode=allow&password=wrong-one": "cannot open .*/a.schema=public ",
    }.items():
        with pytest.raises(PlaceError, match=says) as refused:
            await PostgresStore.open(f"postgresql://{address}")
        assert "wrong-o" not in str(refused.value)
        assert "\n" not in str(refused.value)


def test_without_psycopg_it_says_what_to_install():
    code = """if True:
        import sys
        sys.modules["psycopg"] = None
        from strop.errors import StoreError
        try:
            import strop.store.postgres
        except StoreError as error:
            print(error)
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "a store in PostgreSQL needs psycopg. Fix: pip install 'psycopg[binary]'\n"


async def test_close_finishes_what_was_said_and_leaves_nothing_behind(open: Open, sql: Callable, server: Server):
    store = await open(server.url(next(_names)) + "&application_name=closing", size=3)
    writes = [asyncio.create_task(store.enqueue([rollout])) for rollout in rollouts(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    for verb in (store.list(), store.enqueue(rollouts(1))):
        with pytest.raises(StoreError, match=r"is closed\. Fix: open it again"):
            await verb
    await store.close()
    deadline = time.monotonic() + 30
    while sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'closing'").fetchone() != (0,):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    again = await open(f"{server.url(store._address.schema)}")
    assert len(await again.list()) == 50


async def test_an_operation_that_breaks_in_python_is_undone_and_reaches_its_caller_alone(open: Open):
    store = await open()
    await store.enqueue(rollouts(1))
    results = await asyncio.gather(
        store._write(lambda db: db.execute("DELETE FROM rollouts").rowcount // 0),
        store.enqueue(rollouts(2)),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [ZeroDivisionError, int]
    assert len(await store.list()) == 2


def test_one_store_serves_several_event_loops(server: Server, name: str):
    store = asyncio.run(PostgresStore.open(server.url(name)))
    asyncio.run(store.enqueue(rollouts(2)))
    assert len(asyncio.run(store.list())) == 2
    asyncio.run(store.close())


# -- turns of version 3 ------------------------------------------------------------------------------------------------


def write_version_3(server: Server, name: str, turns: list[Turn]) -> None:
    with psycopg.connect(server.url()) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        connection.execute(f"SET search_path = {name}")

        def execute(statement: str, values: Sequence[Any]) -> None:
            connection.execute(statement.replace("?", "%s"), values)

        version_3.fill(execute, turns, postgres.WORDS)


async def test_turns_of_version_3_become_what_each_adds(open: Open, server: Server, name: str, sql: Callable):
    turns = [*talk("a", 30), *wander("b", 80, 1)]
    write_version_3(server, name, turns)
    store = await open()
    for rollout in ("a", "b"):
        given = [turn for turn in turns if turn.rollout == rollout]
        assert await store.turns(rollout) == sorted(given, key=lambda turn: turn.started)
    await store.add_turns(talk("a", 32)[30:])
    assert await store.turns("a") == talk("a", 32)
    tables = sql(f"SELECT tablename FROM pg_tables WHERE schemaname = '{name}'").fetchall()
    assert ("turns",) in tables
    assert ("turns_3",) not in tables
    (longest,) = sql(f"SELECT max(length(messages)) FROM {name}.turns WHERE rollout = 'a'").fetchone()
    assert longest < 1000


KILLED = """
import asyncio, sys, time
from strop.store import postgres, version_3

move = version_3.move_turns

def move_and_wait(db):
    move(db)
    print("now", flush=True)
    time.sleep(8)

from strop.store import schema
schema.MIGRATIONS[3] = (version_3.BEFORE, move_and_wait, version_3.AFTER)
asyncio.run(postgres.PostgresStore.open(sys.argv[1]))
"""


def migrate_and_kill(url: str) -> None:
    """In another process, killed with -9 when all turns were moved."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "now\n"
    process.kill()
    process.communicate()


async def test_a_migration_that_is_killed_loses_nothing(open: Open, server: Server, name: str):
    turns = talk("a", 30)
    write_version_3(server, name, turns)
    migrate_and_kill(server.url(name))
    store = await open()
    assert await store.turns("a") == turns
