"""Turns as version 3 of the store had them, each row with its whole conversation, and how they become version 4's.

    turns ──renamed──▶ turns_3 ──every turn──▶ turns ──rebuilt──▶ the same in every field? ──▶ turns_3 is dropped

All of it is part of the transaction that migrates the store: until that is committed, the store is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.errors import StoreError
from strop.store import rows, turns
from strop.store.transitions import Db
from strop.store.turn_writes import TurnDraft, insert
from strop.types import Turn

BEFORE = "ALTER TABLE turns RENAME TO turns_3;" + turns.TABLES
AFTER = "DROP TABLE turns_3;"

_FIELDS = (
    "id, rollout, attempt, agent, policy, prompt_ids, response_ids, logprobs, versions, sampling, requested, finish, "
    "parent, shared, branch, choice, choices, messages, answer, started, ended"
)
CHUNK = 32
"""Turns read at a time: each may be of some megabytes."""


def move_turns(db: Db) -> None:
    """Fill `turns` from `turns_3`. `StoreError` if one of them would not come back as it was."""
    num_moved = 0
    for chunk in _chunks(db):
        num_moved += insert(db, [TurnDraft(_turn(row)) for _, *row in chunk])
    num_compared = 0
    for rollout, attempt in db.execute("SELECT DISTINCT rollout, attempt FROM turns_3").fetchall():
        moved = {turn.id: turn for turn in turns.rebuild(*turns.read(db, rollout, attempt))}
        ids = [
            id
            for (id,) in db.execute(
                "SELECT id FROM turns_3 WHERE rollout = ? AND attempt = ?", (rollout, attempt)
            ).fetchall()
        ]
        for id in ids:
            row = db.execute(f"SELECT {_FIELDS} FROM turns_3 WHERE id = ?", (id,)).fetchone()
            if id not in moved or not TurnDraft(_turn(row)).is_same(TurnDraft(moved[id])):
                raise _not_moved(f"turn {id!r} would not come back as it was recorded")
            num_compared += 1
    (num_turns,) = db.execute("SELECT count(*) FROM turns_3").fetchone()
    if not num_turns == num_moved == num_compared:
        raise _not_moved(f"of {num_turns} turns {num_moved} were moved and {num_compared} compared")


def _chunks(db: Db) -> Iterator[list[Any]]:
    last = -1
    while chunk := db.execute(
        f"SELECT seq, {_FIELDS} FROM turns_3 WHERE seq > ? ORDER BY seq LIMIT {CHUNK}", (last,)
    ).fetchall():
        yield chunk
        last = chunk[-1][0]


def _turn(row: list[Any]) -> Turn:
    """What later versions added to turns is as a turn has it by default."""
    kinds, fields = rows.kinds(Turn), dict(zip(_FIELDS.split(", "), row, strict=True))
    read = {name: kinds[name].read for name in fields}
    try:
        return Turn(**{name: value if (how := read[name]) is None else how(value) for name, value in fields.items()})
    except rows.UNREADABLE as error:
        raise _not_moved(f"turn {row[0]!r} cannot be read ({error})") from None


def _not_moved(why: str) -> StoreError:
    return StoreError(
        f"the store could not be brought up to date, and is as it was: {why}. Fix: open it with the strop that wrote it"
    )
