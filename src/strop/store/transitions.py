"""The pieces that verbs are made of: how a rollout moves from one status to the next, what an attempt may still do,
what a step consumes. Each runs inside a verb's transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import structs, to_builtins

from strop.errors import Fenced, IllegalTransition, StoreError, UnknownId
from strop.net.secrets import new_key
from strop.store import rows
from strop.store.base import ID, Ref
from strop.types import (
    TRANSITIONS,
    Attempt,
    Cause,
    Event,
    EventKind,
    Lease,
    Reward,
    Rollout,
    Status,
    Step,
    TokenCounts,
    version,
)

R = TypeVar("R")
MANY = 500
"""Rollouts that one statement names at most."""
OPEN = "coalesce(ended, 0) = 0"
"""Of an attempt that is found by its key or token: it has not ended. `ended IS NULL` says the same, and may have a
planner read all that run, which have an index of their own."""


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Db(Protocol):
    """A connection inside a transaction. Parameters are written as `?`."""

    lock: str
    """What is added to a SELECT whose rows nobody else may change until the commit."""
    skip: str
    """The same, leaving out rows that somebody else holds."""
    changed: bool
    """Set when a rollout's status changed, for those who wait for that."""
    queued: bool
    """Set when a rollout was queued, or queued again."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor: ...
    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> Cursor: ...
    def alone(self, name: str, /) -> None:
        """Wait for any other transaction that said the same name, and keep it until the commit."""
        ...


def find(db: Db, id: str, lock: str = "") -> Rollout:
    row = db.execute(f"SELECT {rows.ROLLOUT} FROM rollouts WHERE id = ?" + lock, (rows.text(id),)).fetchone()
    if row is None:
        raise UnknownId(f"there is no rollout {id!r}. Fix: give one that `strop rollouts` lists")
    return rows.rollout(row)


def find_attempt(db: Db, key: str) -> Attempt:
    """The attempt with this key. What the database compares, it compares through its index: how long it takes tells
    nothing about a key that is nearly right."""
    row = db.execute(f"SELECT {rows.ATTEMPT} FROM attempts WHERE key = ?", (rows.text(key),)).fetchone()
    if row is None:
        raise UnknownId("this key opens no attempt. Fix: use the one the agent was given")
    return rows.attempt(row)


def check_running(db: Db, rollout: str, number: int) -> None:
    """Fencing: only the attempt that runs may write. A replaced one has ended, so `ended` says it all."""
    query = "SELECT ended FROM attempts WHERE rollout = ? AND number = ?" + db.lock
    row = db.execute(query, (rows.text(rollout), number)).fetchone()
    if row is None:
        raise UnknownId(f"there is no attempt {number} of rollout {rollout!r}. Fix: give one that `attempts()` lists")
    if row[0] is not None:
        raise Fenced(
            f"attempt {number} of rollout {rollout!r} is over: what it says now is not recorded. Fix: end the agent"
        )


def prolong(db: Db, attempts: Sequence[Ref], until: float) -> list[Ref]:
    """Let the leases of attempts run until then. Returns those that are over or unknown. All go to the database at
    once, in their order, found by their keys alone: whatever else a planner might choose reads all that run."""
    query = f"UPDATE attempts SET lease_until = ? WHERE rollout = ? AND number = ? AND {OPEN}"
    if db.executemany(query, [(until, *attempt) for attempt in attempts]).rowcount == len(attempts):
        return []
    running: set[Ref] = set()
    for first in range(0, len(attempts), MANY):
        some = [rollout for rollout, _ in attempts[first : first + MANY]]
        query = f"SELECT rollout, number, ended FROM attempts WHERE rollout IN ({', '.join('?' * len(some))})"
        running |= {(rollout, number) for rollout, number, ended in db.execute(query, some).fetchall() if not ended}
    return [attempt for attempt in attempts if attempt not in running]


def add(
    db: Db,
    records: Sequence[R],
    attempts: Sequence[Ref],
    insert: Callable[[Db, Sequence[R]], int],
    is_recorded: Callable[[Db, R], bool],
) -> None:
    """Record what running attempts say, each once. What was recorded before, all of it, may be said again at any time:
    the answer to the first time was lost."""
    try:
        for rollout, number in attempts:
            check_running(db, rollout, number)
    except Fenced:
        if all(is_recorded(db, record) for record in records):
            return
        raise
    if insert(db, records) < len(records):
        for record in records:
            is_recorded(db, record)


def tick(db: Db, count: int = 1) -> int:
    """The number of the next change of a rollout, the first of `count`. Whatever writes to their table takes one."""
    (last,) = db.execute("UPDATE strop SET changes = changes + ? RETURNING changes", (count,)).fetchone()
    db.changed = True
    return last - count + 1


def prepare_insert(rollouts: Sequence[Rollout]) -> Callable[[Db], int]:
    """Check new rollouts, and return what puts them into the table and tells how many were new."""
    for given in rollouts:
        if given.status != "queued":
            raise IllegalTransition(f"rollout {given.id!r} is {given.status}, not queued. Fix: enqueue a new one")
        if not ID.fullmatch(given.id):
            raise StoreError(f"a rollout is called {given.id!r}. Fix: use letters, digits, '.', '_', '~' and '-'")
    encoded = [rows.encode(rollout) for rollout in rollouts]

    def insert(db: Db) -> int:
        first = tick(db, len(encoded))
        return db.executemany(
            f"INSERT INTO rollouts ({rows.ROLLOUT}, changed) VALUES ({rows.placeholders(rows.ROLLOUT)}, ?)"
            " ON CONFLICT (id) DO NOTHING",
            [(*row, first + n) for n, row in enumerate(encoded)],
        ).rowcount

    return insert


def move(db: Db, rollout: Rollout, status: Status, **fields: Any) -> Rollout:
    """The one place where a status changes."""
    if status not in TRANSITIONS[rollout.status]:
        raise IllegalTransition(f"rollout {rollout.id!r} is {rollout.status} and cannot become {status}")
    columns = {"status": status, **fields, "changed": tick(db)}
    for name in columns.keys() & {"rewards", "excluded"}:
        columns[name] = rows.to_json(columns[name])
    assignments = ", ".join(f"{name} = ?" for name in columns)
    db.execute(f"UPDATE rollouts SET {assignments} WHERE id = ?", (*columns.values(), rollout.id))
    db.queued |= status == "queued"
    return structs.replace(rollout, status=status, **fields)  # its row is locked: nothing else can have changed


def open_attempt(db: Db, rollout: Rollout, runner: str, now: float, seconds: float, token: str | None) -> Lease:
    attempt = Attempt(
        rollout=rollout.id,
        number=rollout.attempts + 1,
        runner=runner,
        key=new_key(),
        started=now,
        lease_until=now + seconds,
    )
    insert = f"INSERT INTO attempts ({rows.ATTEMPT}, token) VALUES ({rows.placeholders(rows.ATTEMPT)}, ?)"
    db.execute(insert, (*rows.encode(attempt), token))
    return Lease(rollout=move(db, rollout, "running", attempts=attempt.number), attempt=attempt)


def find_leases(db: Db, token: str) -> list[Lease]:
    """The leases that were given to a request before, as far as they still run."""
    db.alone(token)  # the first one may still be on its way
    query = f"SELECT {rows.ATTEMPT} FROM attempts WHERE token = ? AND {OPEN} ORDER BY rollout"
    found = [rows.attempt(row) for row in db.execute(query, (token,)).fetchall()]
    return [Lease(rollout=find(db, attempt.rollout), attempt=attempt) for attempt in found]


def end(db: Db, rollout: Rollout, cause: Cause | None, detail: str | None, given: Sequence[Reward] = ()) -> Rollout:
    """End the attempt that runs, if one does, and move its rollout on."""
    now = time.time()
    db.execute(
        f"UPDATE attempts SET ended = ?, cause = ?, detail = ? WHERE rollout = ? AND number = ? AND {OPEN}",
        (now, cause, detail, rollout.id, rollout.attempts),
    )
    if cause is None:
        rewards = merge_rewards(db, rollout, given)
        excluded = find_excluded(db, rollout)
        return move(db, rollout, "succeeded", ended=now, detail=detail, rewards=rewards, excluded=excluded)
    if cause in ("cancelled", "late"):
        excluded = find_excluded(db, rollout)
        return move(db, rollout, "cancelled", ended=now, cause=cause, detail=detail, excluded=excluded)
    if cause == "interrupted":
        return move(db, rollout, "queued", due=0.0)
    query = "SELECT count(*) FROM attempts WHERE rollout = ? AND cause = ?"
    (times,) = db.execute(query, (rollout.id, cause)).fetchone()
    retry = rollout.retries.get(cause)
    if retry is not None and times <= retry.limit:
        return move(db, rollout, "queued", due=now + retry.pause(times))
    excluded = find_excluded(db, rollout)
    return move(db, rollout, "failed", ended=now, cause=cause, detail=detail, excluded=excluded)


def has_ended_with(
    db: Db, rollout: Rollout, attempt: int, cause: Cause | None, detail: str | None, given: Sequence[Reward]
) -> bool:
    """Whether an attempt that is over ended in just this way."""
    query = "SELECT cause, detail FROM attempts WHERE rollout = ? AND number = ?"
    ended = db.execute(query, (rollout.id, attempt)).fetchone()
    if ended is None:
        raise UnknownId(
            f"there is no attempt {attempt} of rollout {rollout.id!r}. Fix: give one that `attempts()` lists"
        )
    if tuple(ended) != (cause, detail):
        return False
    last = {reward.target: reward for reward in given}
    return cause is not None or (rollout.attempts == attempt and set(last.values()) <= set(rollout.rewards))


def merge_rewards(db: Db, rollout: Rollout, given: Sequence[Reward]) -> tuple[Reward, ...]:
    """Rewards of the attempt's events in their order, then those given; of the same target the last one wins."""
    rewards = [*(rows.reward(event.data) for event in _list_events(db, rollout, "reward")), *given]
    return tuple({reward.target: reward for reward in rewards}.values())


def find_excluded(db: Db, rollout: Rollout) -> dict[str, str]:
    """The turns that the attempt's events exclude, and why: those of failed attempts too, which may be trained."""
    said = [rows.exclusion(event.data) for event in _list_events(db, rollout, "exclude")]
    return {one.turn: one.reason for one in said}


def _list_events(db: Db, rollout: Rollout, kind: EventKind) -> list[Event]:
    query = f"SELECT {rows.EVENT} FROM events WHERE rollout = ? AND attempt = ? AND kind = ? ORDER BY seq"
    return [rows.event(row) for row in db.execute(query, (rollout.id, rollout.attempts, kind)).fetchall()]


def add_rewards(db: Db, rollout: Rollout, given: Sequence[Reward]) -> None:
    """Give rewards to a rollout that has succeeded. Their events are named after their targets, so that they stay."""
    if rollout.status != "succeeded":
        raise StoreError(
            f"rollout {rollout.id!r} is {rollout.status}, and only one that succeeded gets rewards afterwards. Fix: "
            "leave it out"
        )
    for one in given:
        id = "afterwards/" + rows.to_json(one.target)
        data, now = to_builtins(one), time.time()
        event = Event(id=id, rollout=rollout.id, attempt=rollout.attempts, kind="reward", data=data, time=now)
        query = "SELECT data FROM events WHERE rollout = ? AND attempt = ? AND id = ?"
        there = db.execute(query, (rollout.id, rollout.attempts, id)).fetchone()
        if there is None:
            db.execute(
                f"INSERT INTO events ({rows.EVENT}) VALUES ({rows.placeholders(rows.EVENT)})", rows.encode(event)
            )
        elif there[0] != rows.to_json(data):
            raise StoreError(
                f"rollout {rollout.id!r} was given its reward {one.name!r} before, which stays. Fix: use another name"
            )
    last = {one.target: one for one in (*rollout.rewards, *given)}
    db.execute("UPDATE rollouts SET rewards = ? WHERE id = ?", (rows.to_json(tuple(last.values())), rollout.id))


def lock_attempt(db: Db, rollout: Rollout) -> tuple[str, float]:
    """Lock the attempt that runs: its runner, and when its lease ends. A verb that ends several locks them all before
    it ends the first, since counting a change comes after every other lock."""
    query = f"SELECT runner, lease_until FROM attempts WHERE rollout = ? AND number = ? AND {OPEN}" + db.lock
    return db.execute(query, (rollout.id, rollout.attempts)).fetchone()


def lock_running(db: Db, late: float | None) -> list[Rollout]:
    """Lock the rollouts that run and that nobody else holds: all, or those whose lease ended before `late`. Leases lead
    to those, alone: joined with the rollouts a planner may go through all that run."""
    query = f"SELECT {rows.ROLLOUT} FROM rollouts WHERE status = 'running'"
    if late is None:
        return [rows.rollout(row) for row in db.execute(f"{query} ORDER BY id" + db.skip).fetchall()]
    found = db.execute("SELECT rollout FROM attempts WHERE ended IS NULL AND lease_until < ?", (late,)).fetchall()
    ids, locked = sorted({id for (id,) in found}), list[Rollout]()
    for first in range(0, len(ids), MANY):
        some = ids[first : first + MANY]
        these = f"{query} AND id IN ({', '.join('?' * len(some))}) ORDER BY id"
        locked += [rows.rollout(row) for row in db.execute(these + db.skip, some).fetchall()]
    return locked


def end_lost(db: Db, rollout: Rollout, runner: str, lease_until: float, now: float, everything: bool) -> str | None:
    """End a rollout's attempt as lost, unless it gave a sign of life meanwhile."""
    if everything:
        end(db, rollout, "interrupted", "the run ended while it was running")
    elif lease_until < now:
        silent = f"runner {runner} gave no sign of life for {now - lease_until:.0f} s past its lease"
        end(db, rollout, "lost_runner", silent)
    else:
        return None
    return rollout.id


def requeue_failed(db: Db) -> list[str]:
    """Queue what failed once more, while no step was ever committed."""
    if db.execute("SELECT 1 FROM steps LIMIT 1").fetchone():
        return []
    query = f"SELECT {rows.ROLLOUT} FROM rollouts WHERE status = 'failed' ORDER BY id" + db.skip
    failed = [rows.rollout(row) for row in db.execute(query).fetchall()]
    return [move(db, rollout, "queued", ended=None, cause=None, detail=None, due=0.0).id for rollout in failed]


def commit_step(db: Db, step: Step, tokens: Mapping[str, TokenCounts]) -> None:
    written = sorted({*step.rollouts, *step.dropped})  # rollouts before the store's own row, as every verb locks them
    for first in range(0, len(written), MANY):
        some = written[first : first + MANY]
        marks = ", ".join("?" * len(some))
        db.execute(f"SELECT id FROM rollouts WHERE id IN ({marks}) ORDER BY id{db.lock}", some).fetchall()
    db.execute("SELECT changes FROM strop" + db.lock).fetchone()  # one step at a time
    newest = newest_lineage(db)
    if step.lineage < newest:
        raise StoreError(
            f"step {step.version} belongs to a line that {newest} replaced. Fix: end this run, another has gone on"
        )
    positions = {rollout: position for position, rollout in enumerate(step.rollouts)}
    consumed = [
        (step.lineage, step.number, rollout, positions.get(rollout), step.dropped.get(rollout))
        for rollout in {**positions, **step.dropped}
    ]
    query = "SELECT lineage, digest, time FROM steps WHERE number = ? AND superseded = 0"
    if there := db.execute(query, (step.number,)).fetchone():
        query = "SELECT * FROM consumed WHERE lineage = ? AND number = ?"
        before = {tuple(row) for row in db.execute(query, (step.lineage, step.number)).fetchall()}
        if tuple(there) == (step.lineage, step.digest, step.time) and before == set(consumed):
            return  # the answer to the first time was lost
        raise StoreError(f"step {step.number} was committed before. Fix: commit each step once")
    for first in range(0, len(consumed), MANY):
        _consumable(db, [row[2] for row in consumed[first : first + MANY]])
    db.execute(
        f"INSERT INTO steps ({rows.STEP}) VALUES ({rows.placeholders(rows.STEP)})",
        (
            step.lineage,
            step.number,
            rows.to_json(step.metrics),
            step.checkpoint,
            step.digest,
            int(step.superseded),
            step.time,
        ),
    )
    db.executemany("INSERT INTO consumed VALUES (?, ?, ?, ?, ?)", consumed)
    counted = [(rows.to_json(tokens.get(row[2], {})), row[2]) for row in consumed]
    db.executemany("UPDATE rollouts SET tokens = ? WHERE id = ?", counted)
    set_versions(db, step.version)


def name_checkpoint(db: Db, lineage: int, number: int, checkpoint: str) -> None:
    query = "SELECT checkpoint, superseded FROM steps WHERE lineage = ? AND number = ?" + db.lock
    there, step = db.execute(query, (lineage, number)).fetchone(), version(lineage, number)
    if there is None:
        raise UnknownId(f"there is no step {step} to name a checkpoint of. Fix: commit it first")
    if there[1]:
        raise StoreError(f"step {step} was superseded. Fix: end this run, another has gone on")
    if there[0] not in (None, checkpoint):
        raise StoreError(f"the checkpoint of step {step} is {there[0]!r}. Fix: make one of each step")
    query = "UPDATE steps SET checkpoint = ? WHERE lineage = ? AND number = ?"
    db.execute(query, (checkpoint, lineage, number))


def _consumable(db: Db, rollouts: Sequence[str]) -> None:
    """All of them are there, and no step of the present line has consumed one."""
    marks = ", ".join("?" * len(rollouts))
    there = {id for (id,) in db.execute(f"SELECT id FROM rollouts WHERE id IN ({marks})", rollouts).fetchall()}
    for rollout in rollouts:
        if rollout not in there:
            find(db, rollout)  # says that it is not there
    taken = db.execute(
        "SELECT rollout, number FROM consumed JOIN steps USING (lineage, number)"
        f" WHERE superseded = 0 AND rollout IN ({marks}) ORDER BY rollout LIMIT 1",
        rollouts,
    ).fetchone()
    if taken:
        raise StoreError(f"rollout {taken[0]!r} was consumed by step {taken[1]}. Fix: train on each rollout once")


def newest_lineage(db: Db) -> int:
    query = "SELECT max(number) FROM (SELECT number FROM lineages UNION SELECT lineage FROM steps) AS all_of_them"
    return db.execute(query).fetchone()[0] or 0


def set_versions(db: Db, version: str | None) -> None:
    """Every policy of the store has this version now; None: the one it began with."""
    count = (
        db.execute("UPDATE policies SET version = original")
        if version is None
        else db.execute("UPDATE policies SET version = ?", (version,))
    ).rowcount
    if count == 0:
        raise UnknownId("the store has no policy. Fix: put one first")
