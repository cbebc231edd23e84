"""A store of an older version is brought up to date when it is opened, with everything in it."""

import sqlite3
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.store import schema
from strop.store.sqlite import SqliteStore
from strop.types import Event, Policy, Retry, Reward, Rollout, Task

VERSION_1 = """
CREATE TABLE strop (version INTEGER NOT NULL);

CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, grp TEXT NOT NULL, member INTEGER NOT NULL, task TEXT NOT NULL, mode TEXT NOT NULL,
    seed INTEGER NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL, max_attempts INTEGER NOT NULL,
    created REAL NOT NULL, ended REAL, cause TEXT, detail TEXT, rewards TEXT NOT NULL,
    changed INTEGER NOT NULL
);
CREATE INDEX rollouts_status ON rollouts (status, seq);
CREATE INDEX rollouts_group ON rollouts (grp);
CREATE INDEX rollouts_changed ON rollouts (changed);

CREATE TABLE attempts (
    rollout TEXT NOT NULL, number INTEGER NOT NULL, runner TEXT NOT NULL, key TEXT NOT NULL, started REAL NOT NULL,
    lease_until REAL NOT NULL, ended REAL, cause TEXT, detail TEXT,
    PRIMARY KEY (rollout, number)
) WITHOUT ROWID;
CREATE INDEX attempts_running ON attempts (lease_until) WHERE ended IS NULL;

CREATE TABLE turns (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, rollout TEXT NOT NULL, attempt INTEGER NOT NULL,
    agent TEXT NOT NULL, policy TEXT NOT NULL, prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, versions TEXT NOT NULL, sampling TEXT NOT NULL, requested TEXT NOT NULL,
    finish TEXT NOT NULL, parent TEXT, shared INTEGER NOT NULL, branch TEXT, choice INTEGER NOT NULL,
    choices INTEGER NOT NULL, messages TEXT NOT NULL, answer TEXT NOT NULL, started REAL NOT NULL, ended REAL NOT NULL
);
CREATE INDEX turns_attempt ON turns (rollout, attempt);

CREATE TABLE events (
    seq INTEGER PRIMARY KEY, rollout TEXT NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL,
    time REAL NOT NULL
);
CREATE INDEX events_attempt ON events (rollout, attempt);

CREATE TABLE policies (
    name TEXT PRIMARY KEY, version TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL,
    original TEXT NOT NULL
);
CREATE TABLE lineages (number INTEGER PRIMARY KEY, after INTEGER NOT NULL);
CREATE TABLE steps (
    lineage INTEGER NOT NULL, number INTEGER NOT NULL, metrics TEXT NOT NULL, checkpoint TEXT, digest TEXT,
    superseded INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (lineage, number)
);
CREATE TABLE consumed (
    lineage INTEGER NOT NULL, number INTEGER NOT NULL, rollout TEXT NOT NULL,
    position INTEGER,
    dropped TEXT,
    PRIMARY KEY (lineage, number, rollout)
) WITHOUT ROWID;
CREATE INDEX consumed_rollout ON consumed (rollout);"""

RECORDS = """
INSERT INTO strop VALUES (1);
INSERT INTO rollouts VALUES (1, 'g1.0', 'g1', 0, '{"id":"t","split":"train","data":{"q":1},"agent":null}', 'train', 7,
    'succeeded', 1, 3, 1.0, 2.0, NULL, NULL, '[{"name":"reward","value":0.5,"turn":null,"agent":null}]', 2);
INSERT INTO rollouts VALUES (2, 'g1.1', 'g1', 1, '{"id":"t","split":"train","data":null,"agent":null}', 'train', 8,
    'running', 1, 3, 1.0, NULL, NULL, NULL, '[]', 4);
INSERT INTO attempts VALUES ('g1.0', 1, 'w', 'k0', 1.0, 9.0, 2.0, NULL, NULL);
INSERT INTO attempts VALUES ('g1.1', 1, 'w', 'k1', 1.0, 9.0, NULL, NULL, NULL);
INSERT INTO turns VALUES (1, 'g1.0/1/0', 'g1.0', 1, 'main', 'main', x'01000000', x'02000000', x'000000000000e0bf',
    '[[0,"1.0"]]', '{"temperature":1.0}', '{}', 'stop', NULL, 0, NULL, 0, 1, '[]', '{}', 1.0, 2.0);
INSERT INTO events VALUES (1, 'g1.0', 1, 'message', '{"n":1}', 1.5);
INSERT INTO events VALUES (2, 'g1.1', 1, 'reward', '{"name":"reward","value":1.0}', 1.5);
INSERT INTO policies VALUES ('main', '1.1', 'strop/nano', 'weights', '1.0');
INSERT INTO steps VALUES (1, 1, '{"loss":0.5}', NULL, NULL, 0, 3.0);
INSERT INTO consumed VALUES (1, 1, 'g1.0', 0, NULL);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "store.sqlite"
    db = sqlite3.connect(path)
    db.executescript(VERSION_1 + RECORDS)
    db.close()
    return path


async def test_everything_of_version_1_is_there_and_work_goes_on(old: Path):
    for _ in range(2):  # opened a second time it is as new
        store = await SqliteStore.open(old)
        first, second = await store.list()
        tried = {"lost_runner": Retry(limit=2), "engine_error": Retry(limit=2, wait=1.0)}
        assert first == Rollout(
            id="g1.0",
            group="g1",
            member=0,
            task=Task(id="t", data={"q": 1}),
            seed=7,
            status="succeeded",
            attempts=1,
            retries=tried,
            created=1.0,
            ended=2.0,
            rewards=(Reward(value=0.5),),
        )
        assert (second.status, second.retries) == ("running", tried)
        (turn,) = await store.turns("g1.0")
        assert (turn.prompt_ids, turn.response_ids, turn.logprobs) == ([1], [2], [-0.5])
        told = Event(id="e1", rollout="g1.0", attempt=1, kind="message", data={"n": 1}, time=1.5)
        assert await store.events("g1.0") == [told]
        assert [s.rollouts for s in await store.steps()] == [["g1.0"]]
        assert await store.policies() == [Policy(name="main", version="1.1", model="strop/nano")]
        await store.close()
    store = await SqliteStore.open(old)
    found = await store.attempt("k1")
    assert (found.rollout, found.number) == ("g1.1", 1)
    cursor, _ = await store.wait(0, timeout=0)
    assert cursor == 4
    assert (await store.finish("g1.1", 1)).reward() == 1.0  # its attempt was running, with an event
    later, (changed,) = await store.wait(cursor, timeout=0)
    assert (later, changed.id) == (5, "g1.1")
    await store.close()


async def test_a_migrated_store_has_the_tables_of_a_new_one(old: Path, tmp_path: Path):
    await (await SqliteStore.open(old)).close()
    await (await SqliteStore.open(tmp_path / "new.sqlite")).close()

    def columns(path: Path) -> dict[str, set[str]]:
        db = sqlite3.connect(path)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'index')")]
        found = {name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in tables}
        db.close()
        return {name: names for name, names in found.items() if not name.startswith("sqlite_")}

    assert columns(old) == columns(tmp_path / "new.sqlite")


async def test_a_migration_that_fails_changes_nothing(old: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(schema.MIGRATIONS, 1, "ALTER TABLE events ADD COLUMN id TEXT; UPDATE nowhere SET x = 1;")
    with pytest.raises(StoreError, match="nowhere"):
        await SqliteStore.open(old)
    monkeypatch.undo()
    store = await SqliteStore.open(old)
    assert len(await store.events("g1.0")) == 1
    await store.close()


async def test_a_store_of_version_2_gets_its_index(tmp_path: Path):
    path = tmp_path / "store.sqlite"
    await (await SqliteStore.open(path)).close()
    with sqlite3.connect(path) as db:
        db.executescript("DROP INDEX attempts_key; UPDATE strop SET version = 2;")
    db.close()
    store = await SqliteStore.open(path)
    await store.enqueue([Rollout(id="a", group="a", member=0, task=Task(id="t"), created=1.0)])
    (lease,) = await store.lease("w", seconds=30)
    assert await store.attempt(lease.attempt.key) == lease.attempt
    await store.close()
    db = sqlite3.connect(path)
    (plan,) = db.execute("EXPLAIN QUERY PLAN SELECT * FROM attempts WHERE key = 'k'").fetchall()
    assert "USING INDEX attempts_key" in plan[-1]
    assert db.execute("SELECT version FROM strop").fetchone() == (schema.VERSION,)
    db.close()
