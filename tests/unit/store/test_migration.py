"""A store of an older version is brought up to date when it is opened, with everything in it."""

import fcntl
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli.rollouts import open_run
from strop.errors import PlaceError, StoreError
from strop.store import schema
from strop.store.sqlite import SqliteStore, is_outdated
from strop.types import Event, Policy, Retry, Reward, Rollout, Task, Turn
from tests.unit.store import version_3
from tests.unit.store.conversations import talk, wander

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

    def read(path: Path) -> dict[str, set[str] | str]:
        """The columns of tables, and how indexes are made."""
        db = sqlite3.connect(path)
        made = db.execute("SELECT name, type, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite%'").fetchall()
        found: dict[str, set[str] | str] = {name: sql for name, kind, sql in made if kind == "index"}
        for name in {name for name, kind, _ in made if kind == "table"}:
            found[name] = {row[1] for row in db.execute(f"PRAGMA table_info({name})")}
        db.close()
        return found

    assert read(old) == read(tmp_path / "new.sqlite")


async def test_a_migration_that_fails_changes_nothing(old: Path, monkeypatch: pytest.MonkeyPatch):
    script = "ALTER TABLE events ADD COLUMN id TEXT; UPDATE nowhere SET x = 1;"
    monkeypatch.setitem(schema.MIGRATIONS, 1, (script,))
    with pytest.raises(StoreError, match="nowhere"):
        await SqliteStore.open(old)
    monkeypatch.undo()
    store = await SqliteStore.open(old)
    assert len(await store.events("g1.0")) == 1
    await store.close()


async def test_a_store_of_version_2_gets_its_index(tmp_path: Path):
    path = tmp_path / "store.sqlite"
    version_3.write(path, [])
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


# -- version 3: every row had its whole conversation -------------------------------------------------------------------


@pytest.fixture
def turns() -> list[Turn]:
    return [*talk("a", 30), *talk("a", 30, attempt=2), *wander("b", 80, 1), *wander("c", 80, 2)]


async def check(path: Path, turns: list[Turn]) -> None:
    """Everything is there, and more can be recorded."""
    store = await SqliteStore.open(path)
    for rollout, attempt in sorted({(turn.rollout, turn.attempt) for turn in turns}):
        given = [turn for turn in turns if (turn.rollout, turn.attempt) == (rollout, attempt)]
        assert await store.turns(rollout, attempt=attempt) == sorted(given, key=lambda turn: turn.started)
    await store.add_turns(talk("a", 32, attempt=2)[30:])
    assert len(await store.turns("a")) == 32
    await store.close()


async def test_turns_of_version_3_become_what_each_adds(tmp_path: Path, turns: list[Turn]):
    path = tmp_path / "store.sqlite"
    version_3.write(path, turns)
    size = path.stat().st_size
    await check(path, turns)
    assert path.stat().st_size < size / 2  # and the file gives back what it no longer needs
    db = sqlite3.connect(path)
    assert "turns_3" not in str(db.execute("SELECT name FROM sqlite_master").fetchall())
    db.close()


MIGRATE = """
import asyncio, sys, time
from strop.store import schema
from strop.store.sqlite import SqliteStore

seen = [0]
run = schema.run

class Slow:
    def __init__(self, db): self.db = db
    def __getattr__(self, name): return getattr(self.db, name)
    def execute(self, *given): return self.stop(self.db.execute, given)
    def executemany(self, *given): return self.stop(self.db.executemany, given)
    def stop(self, do, given):
        done = do(*given)
        seen[0] += 1
        if seen[0] == int(sys.argv[2]):
            print("now", flush=True)
            time.sleep(600)
        return done

schema.run = lambda db, script, words: run(Slow(db), script, words)
asyncio.run(SqliteStore.open(sys.argv[1]))
print("done", seen[0], flush=True)
"""


def migrate(path: Path, stop: int) -> str:
    """Open a store in another process, and kill that with -9 after so many statements of the migration."""
    process = subprocess.Popen([sys.executable, "-c", MIGRATE, str(path), str(stop)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return said


async def test_a_migration_that_is_killed_loses_nothing(tmp_path: Path, turns: list[Turn]):
    version_3.write(tmp_path / "old.sqlite", turns)

    def copy(name: str) -> Path:
        return Path(shutil.copy(tmp_path / "old.sqlite", tmp_path / name))

    said, _, count = migrate(copy("whole.sqlite"), 0).partition(" ")
    assert said == "done"
    last = int(count)
    for stop in (1, 2, last // 4, last // 2, 3 * last // 4, last - 2, last - 1, last):
        path = copy(f"{stop}.sqlite")
        assert migrate(path, stop) == "now"
        db = sqlite3.connect(path)
        assert db.execute("SELECT version FROM strop").fetchone() == (3,)
        assert db.execute("SELECT count(*) FROM turns").fetchone() == (len(turns),)
        db.close()
        await check(path, turns)


@pytest.mark.parametrize("damage", ["sampling = '{\"temperature\":null}'", "messages = '{'", "prompt_ids = x'0102'"])
async def test_a_turn_that_cannot_be_read_stops_the_migration_by_its_name(old: Path, damage: str):
    with sqlite3.connect(old) as db:
        db.execute(f"UPDATE turns SET {damage}")
    with pytest.raises(StoreError, match=r"is as it was: turn 'g1.0/1/0' cannot be read"):
        await SqliteStore.open(old)


@pytest.mark.parametrize("damage", ["DELETE FROM strop", "UPDATE strop SET version = 'x'"])
async def test_a_store_that_does_not_say_its_version_is_refused(old: Path, damage: str):
    with sqlite3.connect(old) as db:
        db.execute(damage)
    with pytest.raises(StoreError, match="does not say which version it has"):
        await SqliteStore.open(old)


async def test_a_store_that_an_older_strop_writes_to_is_not_migrated_by_a_reader(old: Path):
    (old.parent / "config.json").write_text("{}")
    with (old.parent / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PlaceError, match="an older strop is at work"):
            await open_run(str(old.parent))
        assert is_outdated(old)
    store = await open_run(str(old.parent))
    await store.close()
    assert not is_outdated(old)


async def test_a_turn_that_would_not_come_back_stops_the_migration(
    tmp_path: Path, turns: list[Turn], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "store.sqlite"
    version_3.write(path, turns)
    monkeypatch.setattr("strop.store.turn_writes.EarlierTurn.has_ids", lambda self, ids, count: True)  # some turns lie
    with pytest.raises(StoreError, match="would not come back as it was recorded"):
        await SqliteStore.open(path)
    monkeypatch.undo()
    await check(path, turns)
