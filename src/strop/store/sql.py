"""What every verb does to the tables, the same in every SQL database.

A verb is one function of a connection inside a transaction. The backends (`sqlite`, `postgres`) say how a transaction
is run and made durable, and in which two words their SQL differs: how rows are locked, and how locked ones are skipped.

Locks are taken in one order, so that no two verbs ever wait for each other: rows of rollouts by id, then of attempts,
then the one row of `strop`, which counts the changes of rollouts. Holding it until the commit makes the order of those
numbers the order in which changes become visible: a cursor never runs past a change that is still on its way.
"""

from __future__ import annotations

import builtins
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from strop.errors import Fenced, StoreError, UnknownId
from strop.store import encoded_turns, rows, transitions, turn_writes
from strop.store import turns as stored
from strop.store.base import Ref, Store
from strop.store.pages import RolloutPages, RolloutQuery
from strop.store.signals import Signal, wait_until
from strop.store.transitions import Db
from strop.store.written import WrittenTurns
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
    TokenCounts,
    Turn,
    version,
)

T = TypeVar("T")
PAGE = 1000
"""Most rollouts one `wait` answers with; the cursor leads on to the rest."""

HELD = 1.0
"""Seconds until one looks again for a rollout that somebody else held."""

Operation = Callable[[Db], T]


class SqlStore(Store):
    """The verbs. A backend gives `_write` and `_read`, and fires the signals after what it committed."""

    def __init__(self) -> None:
        self._changed = Signal()  # a rollout's status changed
        self._queued = Signal()  # a rollout was queued, or queued again
        self._written = WrittenTurns()
        self._pages = RolloutPages()

    @abstractmethod
    async def _write(self, operation: Operation[T]) -> T:
        """Run it in a transaction; returns once that is durable."""

    @abstractmethod
    async def _read(self, operation: Operation[T]) -> T:
        """Run it on one view of the data."""

    async def _look_up(self, operation: Operation[T]) -> T:
        """The same, for what an index leads to and is not much: a backend may do it at once."""
        return await self._read(operation)

    # -- rollouts ------------------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        insert = transitions.prepare_insert(rollouts)

        def write(db: Db) -> int:
            db.queued = True
            return insert(db)

        return await self._write(write) if rollouts else 0

    async def begin(self, rollout: Rollout, runner: str, *, seconds: float) -> Lease:
        insert, token = transitions.prepare_insert([rollout]), f"begin {rollout.id}"

        def write(db: Db) -> Lease:
            if before := transitions.find_leases(db, token):
                return before[0]
            if not insert(db):
                raise StoreError(f"there is a rollout {rollout.id!r} already. Fix: choose another id")
            return transitions.open_attempt(db, rollout, runner, time.time(), seconds, token)

        return await self._write(write)

    async def lease(
        self,
        runner: str,
        *,
        seconds: float,
        count: int = 1,
        wait: float = 0.0,
        token: str | None = None,
        rollout: str | None = None,
    ) -> builtins.list[Lease]:
        next_due = float("inf")
        which, named = ("id = ? AND", (rows.text(rollout),)) if rollout is not None else ("", ())

        def write(db: Db) -> builtins.list[Lease]:
            nonlocal next_due
            if token is not None and (before := transitions.find_leases(db, token)):
                return before
            now = time.time()
            free = db.execute(
                f"SELECT {rows.ROLLOUT} FROM rollouts WHERE {which} status = 'queued' AND due <= ? ORDER BY seq LIMIT ?"
                + db.skip,
                (*named, now, count),
            ).fetchall()
            if not free:  # one that is due is held by somebody, who may let it go without a word
                (due,) = db.execute(
                    "SELECT min(CASE WHEN due > ? THEN due ELSE ? END) FROM rollouts WHERE status = 'queued'",
                    (now, now + HELD),
                ).fetchone()
                next_due = float("inf") if due is None else due
            return [transitions.open_attempt(db, rows.rollout(row), runner, now, seconds, token) for row in free]

        async def look() -> builtins.list[Lease] | None:
            return await self._write(write) or None

        return await wait_until(self._queued, wait, look, lambda: next_due - time.time()) or []

    async def heartbeat(self, attempts: Sequence[Ref], *, seconds: float) -> builtins.list[Ref]:
        def write(db: Db) -> builtins.list[Ref]:
            return transitions.prolong(db, sorted(set(attempts)), time.time() + seconds)

        return await self._write(write) if attempts else []

    async def finish(
        self,
        rollout: str,
        attempt: int,
        *,
        rewards: Sequence[Reward] = (),
        cause: Cause | None = None,
        detail: str | None = None,
    ) -> Rollout:
        given, said = [rows.check_reward(reward) for reward in rewards], rows.text(detail)

        def write(db: Db) -> Rollout:
            now = transitions.find(db, rollout, db.lock)
            if (now.status, now.attempts) == ("running", attempt):
                return transitions.end(db, now, cause, said, given)
            if transitions.has_ended_with(db, now, attempt, cause, said, given):
                return now  # the answer to the first time was lost
            raise Fenced(f"attempt {attempt} of rollout {rollout!r} is over already. Fix: finish each attempt once")

        ended = await self._write(write)
        self._written.forget(rollout)
        return ended

    async def cancel(
        self, rollouts: Sequence[str], *, detail: str, cause: Literal["cancelled", "late"] = "cancelled"
    ) -> None:
        def write(db: Db) -> None:
            found = [transitions.find(db, id, db.lock) for id in sorted(set(rollouts))]
            for rollout in found:
                if rollout.status == "running":
                    transitions.lock_attempt(db, rollout)
            for rollout in found:
                if rollout.status not in TERMINAL:
                    transitions.end(db, rollout, cause, rows.text(detail))

        if rollouts:
            await self._write(write)

    async def reclaim(self, *, everything: bool = False) -> builtins.list[str]:
        now = time.time()  # not later: heartbeats that wait for the store as well must not come too late for it

        def write(db: Db) -> builtins.list[str]:
            found = transitions.lock_running(db, None if everything else now)
            running = [(rollout, *transitions.lock_attempt(db, rollout)) for rollout in found]
            ended = [
                id for attempt in running if (id := transitions.end_lost(db, *attempt, now, everything)) is not None
            ]
            return ended + (transitions.requeue_failed(db) if everything else [])

        return await self._write(write)

    # -- what happened in them -------------------------------------------------------------------------------------

    async def add_turns(self, turns: Sequence[Turn]) -> None:
        turn_writes.refuse_infinite(turns)
        attempts = sorted({(turn.rollout, turn.attempt) for turn in turns})
        drafts = [turn_writes.TurnDraft(turn, self._written) for turn in turns]

        def write(db: Db) -> None:
            transitions.add(db, drafts, attempts, turn_writes.insert, turn_writes.RecordedTurns().has)

        if not drafts:
            return
        await self._write(write)
        for draft in drafts:
            if written := draft.written:
                self._written.add(draft.turn, written)

    async def add_encoded(self, turns: Sequence[encoded_turns.EncodedTurn]) -> None:
        """`add_turns` of turns that are rows already. Another process of ours made them."""
        attempts = encoded_turns.find_attempts(turns)

        def write(db: Db) -> None:
            transitions.add(db, turns, attempts, encoded_turns.insert_encoded, encoded_turns.is_recorded)

        await self._write(write)

    async def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            rows.check_event(event)
        attempts = sorted({(event.rollout, event.attempt) for event in events})
        encoded = [rows.encode(event) for event in events]

        def is_recorded(db: Db, row: rows.Row) -> bool:
            id, rollout, attempt, kind, data, _ = row
            query = "SELECT kind, data FROM events WHERE rollout = ? AND attempt = ? AND id = ?"
            found = db.execute(query, (rollout, attempt, id)).fetchone()
            if found is not None and tuple(found) != (kind, data):
                raise StoreError(f"event {id!r} was recorded before. Fix: give each event an id of its own")
            return found is not None

        def insert(db: Db, encoded: Sequence[rows.Row]) -> int:
            statement = (
                f"INSERT INTO events ({rows.EVENT}) VALUES ({rows.placeholders(rows.EVENT)}) ON CONFLICT DO NOTHING"
            )
            return db.executemany(statement, encoded).rowcount

        def write(db: Db) -> None:
            transitions.add(db, encoded, attempts, insert, is_recorded)

        if encoded:
            await self._write(write)

    async def add_rewards(self, rewards: Mapping[str, Sequence[Reward]]) -> None:
        for given in rewards.values():
            for reward in given:
                rows.check_reward(reward)

        def write(db: Db) -> None:
            for id in sorted(rewards):
                transitions.add_rewards(db, transitions.find(db, id, db.lock), rewards[id])
            transitions.tick(db)

        if rewards:
            await self._write(write)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def get(self, rollout: str) -> Rollout:
        return await self._look_up(lambda db: transitions.find(db, rollout))

    async def attempts(self, rollout: str) -> builtins.list[Attempt]:
        def read(db: Db) -> builtins.list[Attempt]:
            query = f"SELECT {rows.ATTEMPT} FROM attempts WHERE rollout = ? ORDER BY number"
            found = db.execute(query, (rows.text(rollout),)).fetchall()
            if not found:
                transitions.find(db, rollout)
            return [rows.attempt(row) for row in found]

        return await self._look_up(read)

    async def attempt(self, key: str) -> Attempt:
        return await self._look_up(lambda db: transitions.find_attempt(db, key))

    async def turns(self, rollout: str, *, attempt: int | None = None) -> builtins.list[Turn]:
        def read(db: Db) -> tuple[builtins.list[rows.Row], dict[str, str]]:
            last = transitions.find(db, rollout).attempts
            return stored.read(db, rollout, last if attempt is None else attempt)

        return stored.rebuild(*await self._read(read))

    async def turns_of(self, attempts: Sequence[Ref]) -> builtins.list[builtins.list[Turn]]:
        found = await self._read(lambda db: [stored.read(db, *attempt) for attempt in attempts])
        return [stored.rebuild(*one) for one in found]

    async def events(self, rollout: str, *, attempt: int | None = None) -> builtins.list[Event]:
        def read(db: Db) -> builtins.list[rows.Row]:
            last = transitions.find(db, rollout).attempts
            query = f"SELECT {rows.EVENT} FROM events WHERE rollout = ? AND attempt = ? ORDER BY seq"
            return db.execute(query, (rollout, last if attempt is None else attempt)).fetchall()

        return [rows.event(row) for row in await self._read(read)]

    async def list(
        self,
        *,
        group: str | None = None,
        status: Status | None = None,
        mode: Mode | None = None,
        after: str | None = None,
        limit: int = 1000,
        newest: bool = False,
    ) -> builtins.list[Rollout]:
        query = RolloutQuery(group, status, mode, after, limit, newest)
        return [rows.rollout(row) for row in await self._read_page(query, query.read)]

    async def list_json(self, **which: Any) -> bytes:
        query = RolloutQuery(**which)
        return await self._read_page(query, lambda db: self._pages.read(db, query))

    async def _read_page(self, query: RolloutQuery, read: Operation[T]) -> T:
        return await (self._look_up(read) if query.brief else self._read(read))

    async def wait(self, cursor: int, *, timeout: float) -> tuple[int, builtins.list[Rollout]]:
        def read(db: Db) -> builtins.list[rows.Row]:
            query = f"SELECT changed, {rows.ROLLOUT} FROM rollouts WHERE changed > ? ORDER BY changed LIMIT {PAGE}"
            return db.execute(query, (cursor,)).fetchall()

        async def changes() -> builtins.list[rows.Row] | None:
            return await self._read(read) or None

        found = await wait_until(self._changed, timeout, changes)
        if found is None:
            return cursor, []
        return found[-1][0], [rows.rollout(row[1:]) for row in found]

    async def stats(self) -> dict[str, int]:
        def read(db: Db) -> dict[str, int]:
            counts: dict[str, int] = dict.fromkeys(TRANSITIONS, 0)
            counts |= dict(db.execute("SELECT status, count(*) FROM rollouts GROUP BY status").fetchall())
            tables = {"turns": "turns", "events": "events", "steps": "steps WHERE superseded = 0"}
            return counts | {
                name: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for name, table in tables.items()
            }

        return await self._read(read)

    async def count_open(self) -> dict[str, int]:
        def read(db: Db) -> dict[str, int]:
            query = "SELECT status, count(*) FROM rollouts WHERE status IN ('queued', 'running') GROUP BY status"
            return {"queued": 0, "running": 0} | dict(db.execute(query).fetchall())

        return await self._read(read)

    # -- policies and steps ------------------------------------------------------------------------------------------

    async def put_policy(self, policy: Policy) -> None:
        def write(db: Db) -> None:
            db.execute(
                f"INSERT INTO policies ({rows.POLICY}, original) VALUES ({rows.placeholders(rows.POLICY)}, ?)"
                " ON CONFLICT (name) DO UPDATE SET version = excluded.version, model = excluded.model,"
                " kind = excluded.kind",
                (*rows.encode(policy), policy.version),
            )

        await self._write(write)

    async def policies(self) -> builtins.list[Policy]:
        def read(db: Db) -> builtins.list[Policy]:
            found = db.execute(f"SELECT {rows.POLICY} FROM policies ORDER BY name").fetchall()
            return [rows.policy(row) for row in found]

        return await self._read(read)

    async def commit_step(self, step: Step, tokens: Mapping[str, TokenCounts] | None = None) -> None:
        if len(set(step.rollouts)) < len(step.rollouts):
            raise StoreError(f"step {step.number} names a rollout twice. Fix: consume each one once")
        await self._write(lambda db: transitions.commit_step(db, step, tokens or {}))

    async def name_checkpoint(self, lineage: int, number: int, checkpoint: str) -> None:
        await self._write(lambda db: transitions.name_checkpoint(db, lineage, number, checkpoint))

    async def steps(self, *, superseded: bool = False) -> builtins.list[Step]:
        def read(db: Db) -> builtins.list[Step]:
            consumed: dict[tuple[int, int], builtins.list[rows.Row]] = {}
            query = "SELECT lineage, number, rollout, position, dropped FROM consumed ORDER BY position, rollout"
            for lineage, number, *rest in db.execute(query).fetchall():
                consumed.setdefault((lineage, number), []).append(rest)
            which = "" if superseded else "WHERE superseded = 0"
            found = db.execute(f"SELECT {rows.STEP} FROM steps {which} ORDER BY lineage, number").fetchall()
            return [rows.step(row, consumed.get((row[0], row[1]), ())) for row in found]

        return await self._read(read)

    async def open_lineage(self, *, after: int) -> int:
        def write(db: Db) -> int:
            db.execute("SELECT changes FROM strop" + db.lock).fetchone()  # one new line at a time
            lineage = transitions.newest_lineage(db) + 1
            if after == 0:
                transitions.set_versions(db, None)
            else:
                query = "SELECT lineage FROM steps WHERE number = ? AND superseded = 0"
                row = db.execute(query, (after,)).fetchone()
                if row is None:
                    raise UnknownId(f"there is no step {after} to go on from. Fix: give one that `steps()` lists")
                transitions.set_versions(db, version(row[0], after))
            db.execute("UPDATE steps SET superseded = 1 WHERE number > ?", (after,))
            db.execute("INSERT INTO lineages VALUES (?, ?)", (lineage, after))
            return lineage

        return await self._write(write)
