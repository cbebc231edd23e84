"""The store in one SQLite file: everything a run on one machine knows.

Writes go through one thread with group commit, reads through another (`threads`); `rows` says how records lie in the
tables. One process writes at a time; others may read the file while it does. WAL with synchronous=NORMAL survives
kill -9 of any process, FULL also power loss.

Left out: waking waiters of other processes. `wait` and `lease(wait=...)` hear of changes made by their own process.
"""

from __future__ import annotations

import asyncio
import builtins
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from strop.errors import Fenced, IllegalTransition, NewerStore, PlaceError, StoreError, UnknownId
from strop.store import rows
from strop.store.base import RETRIED, Store
from strop.store.threads import SqliteThread, Writer, explain
from strop.store.waiting import Signal, until
from strop.types import (
    TERMINAL,
    TRANSITIONS,
    Attempt,
    Cause,
    Event,
    Lease,
    Mode,
    Policy,
    Reward,
    Rollout,
    Status,
    Step,
    Turn,
)

T = TypeVar("T")
PAGE = 1000
"""Most rollouts one `wait` answers with; the cursor leads on to the rest."""

Connection = sqlite3.Connection


class SqliteStore(Store):
    """Open it with `await SqliteStore.open("run/store.sqlite")`."""

    def __init__(self, path: str, write: Connection, read: Connection) -> None:
        self.path = path
        self._changed = Signal()  # a rollout's status changed
        self._queued = Signal()  # a rollout was queued, or queued again
        self._writer = Writer(write, path, self._notify)
        self._reader = SqliteThread(read, path, "strop-store-reader")
        # Touched by the writer's thread only.
        self._any_changed = False
        self._any_queued = False

    @classmethod
    async def open(cls, path: str | Path, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> SqliteStore:
        """Open the store in file `path`, made with its folder if it is not there."""
        write, read = await asyncio.to_thread(_open, str(path), synchronous)
        return cls(str(path), write, read)

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    def _notify(self) -> None:
        """In the writer's thread, after a commit."""
        if self._any_queued:
            self._queued.fire()
        if self._any_changed:
            self._changed.fire()
        self._any_queued = self._any_changed = False

    # -- rollouts ------------------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        for given in rollouts:
            if given.status != "queued":
                raise IllegalTransition(f"rollout {given.id!r} is {given.status}: only queued ones can be enqueued")
        encoded = [rows.encode(rollout) for rollout in rollouts]

        def write(db: Connection) -> None:
            db.executemany(
                f"INSERT INTO rollouts ({rows.ROLLOUT}, changed)"
                f" VALUES ({rows.marks(rows.ROLLOUT)}, (SELECT coalesce(max(changed), 0) + 1 FROM rollouts))"
                " ON CONFLICT (id) DO NOTHING",
                encoded,
            )
            self._any_changed = self._any_queued = True

        await self._writer.do(write)

    async def lease(self, runner: str, *, seconds: float, wait: float = 0.0) -> Lease | None:
        def write(db: Connection) -> Lease | None:
            row = db.execute(
                f"SELECT {rows.ROLLOUT} FROM rollouts WHERE status = 'queued' ORDER BY seq LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            rollout = rows.rollout(row)
            now = time.time()
            attempt = Attempt(
                rollout=rollout.id,
                number=rollout.attempts + 1,
                runner=runner,
                key=secrets.token_urlsafe(24),
                started=now,
                lease_until=now + seconds,
            )
            db.execute(
                f"INSERT INTO attempts ({rows.ATTEMPT}) VALUES ({rows.marks(rows.ATTEMPT)})",
                [getattr(attempt, name) for name in attempt.__struct_fields__],
            )
            rollout = self._move(db, rollout, "running", attempts=attempt.number)
            return Lease(rollout=rollout, attempt=attempt)

        return await until(self._queued, wait, lambda: self._writer.do(write))

    async def heartbeat(self, rollout: str, attempt: int, *, seconds: float) -> None:
        def write(db: Connection) -> None:
            _running(db, rollout, attempt)
            db.execute(
                "UPDATE attempts SET lease_until = ? WHERE rollout = ? AND number = ?",
                (time.time() + seconds, rollout, attempt),
            )

        await self._writer.do(write)

    async def finish(
        self,
        rollout: str,
        attempt: int,
        *,
        rewards: Sequence[Reward] = (),
        cause: Cause | None = None,
        detail: str | None = None,
    ) -> Rollout:
        given = [rows.checked(reward) for reward in rewards]

        def write(db: Connection) -> Rollout:
            _running(db, rollout, attempt)
            return self._end(db, _rollout(db, rollout), cause, detail, given)

        return await self._writer.do(write)

    async def cancel(
        self, rollouts: Sequence[str], *, detail: str, cause: Literal["cancelled", "late"] = "cancelled"
    ) -> None:
        def write(db: Connection) -> None:
            for id in rollouts:
                rollout = _rollout(db, id)
                if rollout.status not in TERMINAL:
                    self._end(db, rollout, cause, detail)

        await self._writer.do(write)

    async def reclaim(self, *, everything: bool = False) -> builtins.list[str]:
        def write(db: Connection) -> builtins.list[str]:
            now = time.time()
            lost = db.execute(
                "SELECT rollout, number, runner, lease_until FROM attempts"
                " WHERE ended IS NULL AND (? OR lease_until < ?) ORDER BY lease_until, rollout",
                (everything, now),
            ).fetchall()
            for id, number, runner, lease_until in lost:
                rollout = _rollout(db, id)
                if everything:
                    # The run's own death is not held against its rollouts: however often it dies, they run again.
                    db.execute("UPDATE rollouts SET max_attempts = max_attempts + 1 WHERE id = ?", (id,))
                    rollout, detail = _rollout(db, id), "the run ended while it was running"
                else:
                    detail = f"runner {runner} gave no sign of life for {now - lease_until:.0f} s past its lease"
                assert rollout.attempts == number
                self._end(db, rollout, "lost_runner", detail)
            again: builtins.list[rows.Row] = []
            if everything and not db.execute("SELECT 1 FROM steps LIMIT 1").fetchone():
                again = db.execute("SELECT id FROM rollouts WHERE status = 'failed' ORDER BY seq").fetchall()
            for (id,) in again:
                db.execute("UPDATE rollouts SET max_attempts = max_attempts + 1 WHERE id = ?", (id,))
                self._move(db, _rollout(db, id), "queued", ended=None, cause=None, detail=None)
            return [row[0] for row in [*lost, *again]]

        return await self._writer.do(write)

    def _end(
        self, db: Connection, rollout: Rollout, cause: Cause | None, detail: str | None, given: Sequence[Reward] = ()
    ) -> Rollout:
        """End the attempt that runs, if one does, and move its rollout on."""
        now = time.time()
        db.execute(
            "UPDATE attempts SET ended = ?, cause = ?, detail = ? WHERE rollout = ? AND number = ? AND ended IS NULL",
            (now, cause, detail, rollout.id, rollout.attempts),
        )
        if cause is None:
            rewards = _merged(db, rollout, given)
            return self._move(db, rollout, "succeeded", ended=now, detail=detail, rewards=rewards)
        if cause in RETRIED and rollout.attempts < rollout.max_attempts:
            return self._move(db, rollout, "queued")
        status = "cancelled" if cause in ("cancelled", "late") else "failed"
        return self._move(db, rollout, status, ended=now, cause=cause, detail=detail)

    def _move(self, db: Connection, rollout: Rollout, status: Status, **fields: Any) -> Rollout:
        """The one place where a status changes."""
        if status not in TRANSITIONS[rollout.status]:
            raise IllegalTransition(f"rollout {rollout.id!r} is {rollout.status} and cannot become {status}")
        columns = {"status": status, **fields}
        if "rewards" in columns:
            columns["rewards"] = rows.to_json(columns["rewards"])
        row = db.execute(
            f"UPDATE rollouts SET {', '.join(f'{name} = ?' for name in columns)},"
            " changed = (SELECT max(changed) + 1 FROM rollouts)"
            f" WHERE id = ? RETURNING {rows.ROLLOUT}",
            (*columns.values(), rollout.id),
        ).fetchone()
        self._any_changed = True
        self._any_queued |= status == "queued"
        return rows.rollout(row)

    # -- what happened in them -------------------------------------------------------------------------------------

    async def add_turns(self, turns: Sequence[Turn]) -> None:
        attempts = {(turn.rollout, turn.attempt) for turn in turns}
        encoded = [rows.encode(turn) for turn in turns]

        def write(db: Connection) -> None:
            for rollout, number in attempts:
                _running(db, rollout, number)
            try:
                db.executemany(f"INSERT INTO turns ({rows.TURN}) VALUES ({rows.marks(rows.TURN)})", encoded)
            except sqlite3.IntegrityError:
                ids = ", ".join(repr(turn.id) for turn in turns)
                raise StoreError(
                    f"one of the turns {ids} was recorded before: give each turn an id of its own"
                ) from None

        await self._writer.do(write)

    async def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "reward":
                rows.reward(event.data)
        attempts = {(event.rollout, event.attempt) for event in events}
        encoded = [rows.encode(event) for event in events]

        def write(db: Connection) -> None:
            for rollout, number in attempts:
                _running(db, rollout, number)
            db.executemany(f"INSERT INTO events ({rows.EVENT}) VALUES ({rows.marks(rows.EVENT)})", encoded)

        await self._writer.do(write)

    # -- looking ---------------------------------------------------------------------------------------------------

    async def get(self, rollout: str) -> Rollout:
        return await self._reader.do(lambda db: _rollout(db, rollout))

    async def attempts(self, rollout: str) -> builtins.list[Attempt]:
        def read(db: Connection) -> builtins.list[Attempt]:
            _rollout(db, rollout)
            query = f"SELECT {rows.ATTEMPT} FROM attempts WHERE rollout = ? ORDER BY number"
            return [rows.attempt(row) for row in db.execute(query, (rollout,))]

        return await self._reader.do(read)

    async def turns(self, rollout: str, *, attempt: int | None = None) -> builtins.list[Turn]:
        query = f"SELECT {rows.TURN} FROM turns WHERE rollout = ? AND attempt = ? ORDER BY started, seq"
        return await self._of_attempt(query, rows.turn, rollout, attempt)

    async def events(self, rollout: str, *, attempt: int | None = None) -> builtins.list[Event]:
        query = f"SELECT {rows.EVENT} FROM events WHERE rollout = ? AND attempt = ? ORDER BY seq"
        return await self._of_attempt(query, rows.event, rollout, attempt)

    async def _of_attempt(
        self, query: str, decode: Callable[[rows.Row], T], rollout: str, attempt: int | None
    ) -> builtins.list[T]:
        def read(db: Connection) -> builtins.list[rows.Row]:
            last = _rollout(db, rollout).attempts
            return db.execute(query, (rollout, last if attempt is None else attempt)).fetchall()

        return [decode(row) for row in await self._reader.do(read)]

    async def list(
        self,
        *,
        group: str | None = None,
        status: Status | None = None,
        mode: Mode | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> builtins.list[Rollout]:
        def read(db: Connection) -> builtins.list[Rollout]:
            given = {"grp": group, "status": status, "mode": mode}
            where = {f"{column} = ?": value for column, value in given.items() if value is not None}
            if after is not None:
                _rollout(db, after)
                where["seq > (SELECT seq FROM rollouts WHERE id = ?)"] = after
            query = f"SELECT {rows.ROLLOUT} FROM rollouts WHERE {' AND '.join(where) or '1'} ORDER BY seq LIMIT ?"
            return [rows.rollout(row) for row in db.execute(query, (*where.values(), limit))]

        return await self._reader.do(read)

    async def wait(self, cursor: int, *, timeout: float) -> tuple[int, builtins.list[Rollout]]:
        def read(db: Connection) -> builtins.list[rows.Row]:
            query = f"SELECT changed, {rows.ROLLOUT} FROM rollouts WHERE changed > ? ORDER BY changed LIMIT {PAGE}"
            return db.execute(query, (cursor,)).fetchall()

        async def changes() -> builtins.list[rows.Row] | None:
            return await self._reader.do(read) or None

        found = await until(self._changed, timeout, changes)
        if found is None:
            return cursor, []
        return found[-1][0], [rows.rollout(row[1:]) for row in found]

    async def stats(self) -> dict[str, int]:
        def read(db: Connection) -> dict[str, int]:
            counts: dict[str, int] = dict.fromkeys(TRANSITIONS, 0)
            counts |= dict(db.execute("SELECT status, count(*) FROM rollouts GROUP BY status").fetchall())
            tables = {"turns": "turns", "events": "events", "steps": "steps WHERE NOT superseded"}
            return counts | {
                name: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for name, table in tables.items()
            }

        return await self._reader.do(read)

    # -- policies and steps ------------------------------------------------------------------------------------------

    async def put_policy(self, policy: Policy) -> None:
        def write(db: Connection) -> None:
            db.execute(
                f"INSERT INTO policies ({rows.POLICY}, original) VALUES ({rows.marks(rows.POLICY)}, ?)"
                " ON CONFLICT (name) DO UPDATE SET version = excluded.version, model = excluded.model,"
                " kind = excluded.kind",
                (*rows.encode(policy), policy.version),
            )

        await self._writer.do(write)

    async def policies(self) -> builtins.list[Policy]:
        def read(db: Connection) -> builtins.list[Policy]:
            return [rows.policy(row) for row in db.execute(f"SELECT {rows.POLICY} FROM policies ORDER BY name")]

        return await self._reader.do(read)

    async def commit_step(self, step: Step, *, policy: str) -> None:
        positions = {rollout: position for position, rollout in enumerate(step.rollouts)}
        if len(positions) < len(step.rollouts):
            raise StoreError(f"step {step.number} names a rollout twice: consume each one once")
        consumed = [
            (step.lineage, step.number, rollout, positions.get(rollout), step.dropped.get(rollout))
            for rollout in {**positions, **step.dropped}
        ]

        def write(db: Connection) -> None:
            newest = _newest_lineage(db)
            if step.lineage < newest:
                raise StoreError(f"step {step.version} belongs to a line that {newest} replaced: it is not committed")
            if db.execute("SELECT 1 FROM steps WHERE number = ? AND NOT superseded", (step.number,)).fetchone():
                raise StoreError(f"step {step.number} was committed before")
            for _, _, rollout, _, _ in consumed:
                _rollout(db, rollout)
                taken = db.execute(
                    "SELECT number FROM consumed JOIN steps USING (lineage, number)"
                    " WHERE rollout = ? AND NOT superseded",
                    (rollout,),
                ).fetchone()
                if taken:
                    raise StoreError(
                        f"rollout {rollout!r} was consumed by step {taken[0]}: it cannot be trained on twice"
                    )
            db.execute(
                f"INSERT INTO steps ({rows.STEP}) VALUES ({rows.marks(rows.STEP)})",
                (
                    step.lineage,
                    step.number,
                    rows.to_json(step.metrics),
                    step.checkpoint,
                    step.digest,
                    step.superseded,
                    step.time,
                ),
            )
            db.executemany("INSERT INTO consumed VALUES (?, ?, ?, ?, ?)", consumed)
            _set_version(db, policy, step.version)

        await self._writer.do(write)

    async def steps(self, *, superseded: bool = False) -> builtins.list[Step]:
        def read(db: Connection) -> builtins.list[Step]:
            consumed: dict[tuple[int, int], builtins.list[rows.Row]] = {}
            for lineage, number, *rest in db.execute(
                "SELECT lineage, number, rollout, position, dropped FROM consumed ORDER BY position, rollout"
            ):
                consumed.setdefault((lineage, number), []).append(rest)
            found = db.execute(
                f"SELECT {rows.STEP} FROM steps WHERE ? OR NOT superseded ORDER BY lineage, number", (superseded,)
            )
            return [rows.step(row, consumed.get((row[0], row[1]), ())) for row in found]

        return await self._reader.do(read)

    async def open_lineage(self, policy: str, *, after: int) -> int:
        def write(db: Connection) -> int:
            lineage = _newest_lineage(db) + 1
            if after == 0:
                row = db.execute("SELECT original FROM policies WHERE name = ?", (policy,)).fetchone()
                version = row[0] if row else ""
            else:
                row = db.execute("SELECT lineage FROM steps WHERE number = ? AND NOT superseded", (after,)).fetchone()
                if row is None:
                    raise UnknownId(f"there is no step {after} to go on from: list them with `steps()`")
                version = f"{row[0]}.{after}"
            _set_version(db, policy, version)
            db.execute("UPDATE steps SET superseded = 1 WHERE number > ?", (after,))
            db.execute("INSERT INTO lineages VALUES (?, ?)", (lineage, after))
            return lineage

        return await self._writer.do(write)


# -- pieces of verbs: they run inside a verb's transaction ---------------------------------------------------------


def _rollout(db: Connection, id: str) -> Rollout:
    row = db.execute(f"SELECT {rows.ROLLOUT} FROM rollouts WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise UnknownId(f"there is no rollout {id!r}: `strop rollouts` lists those there are")
    return rows.rollout(row)


def _running(db: Connection, rollout: str, number: int) -> None:
    """Fencing: only the attempt that runs may write. A replaced one has ended, so `ended` says it all."""
    row = db.execute("SELECT ended FROM attempts WHERE rollout = ? AND number = ?", (rollout, number)).fetchone()
    if row is None:
        raise UnknownId(f"there is no attempt {number} of rollout {rollout!r}")
    if row[0] is not None:
        raise Fenced(f"attempt {number} of rollout {rollout!r} is over: what it says now is not recorded")


def _merged(db: Connection, rollout: Rollout, given: Sequence[Reward]) -> tuple[Reward, ...]:
    """Rewards of the attempt's events in their order, then those given; of the same target the last one wins."""
    said = db.execute(
        f"SELECT {rows.EVENT} FROM events WHERE rollout = ? AND attempt = ? AND kind = 'reward' ORDER BY seq",
        (rollout.id, rollout.attempts),
    )
    rewards = [*(rows.reward(rows.event(row).data) for row in said), *given]
    return tuple({reward.target: reward for reward in rewards}.values())


def _newest_lineage(db: Connection) -> int:
    newest = db.execute("SELECT max(number) FROM (SELECT number FROM lineages UNION SELECT lineage FROM steps)")
    return newest.fetchone()[0] or 0


def _set_version(db: Connection, policy: str, version: str) -> None:
    if db.execute("UPDATE policies SET version = ? WHERE name = ?", (version, policy)).rowcount == 0:
        raise UnknownId(f"there is no policy {policy!r}: put it first")


# -- opening -----------------------------------------------------------------------------------------------------


def _open(path: str, synchronous: str) -> tuple[Connection, Connection]:
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlaceError(f"cannot make the folder {folder}: {error.strerror}; choose another one") from None
    try:
        write = _connect(path, "rwc")
        try:
            write.execute("PRAGMA journal_mode = WAL")
            write.execute(f"PRAGMA synchronous = {synchronous}")
            _create_or_check(write, path)
            return write, _connect(path, "ro")
        except BaseException:
            write.close()
            raise
    except sqlite3.Error as error:
        raise explain(error, path) from None


def _connect(path: str, mode: str) -> Connection:
    uri = f"{Path(path).absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)


def _create_or_check(db: Connection, path: str) -> None:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        db.executescript(f"BEGIN IMMEDIATE; {rows.TABLES} INSERT INTO strop VALUES ({rows.VERSION}); COMMIT;")
        return
    if "strop" not in tables:
        raise StoreError(f"{path} is a database of another program: choose another folder")
    (found,) = db.execute("SELECT version FROM strop").fetchone()
    if found > rows.VERSION:
        raise NewerStore(
            f"{path} was written by a newer strop (store version {found}, this one reads {rows.VERSION}):"
            " update with `pip install -U strop`"
        )
