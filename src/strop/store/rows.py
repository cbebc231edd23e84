"""How records lie in SQLite: the tables, and each record to a row and back.

Anyone can open the file with any SQLite tool. Messages, data and metrics are JSON text; token ids are little-endian
int32 and logprobs little-endian float64, so that they come back bit for bit (`numpy.frombuffer` reads them too).
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from strop.errors import BadReward
from strop.types import Attempt, Event, Policy, Reward, Rollout, Step, Turn

VERSION = 1
"""Rises when the tables change; an older strop refuses what a newer one wrote."""

TABLES = """
CREATE TABLE strop (version INTEGER NOT NULL);

CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of enqueueing
    id TEXT NOT NULL UNIQUE, grp TEXT NOT NULL, member INTEGER NOT NULL, task TEXT NOT NULL, mode TEXT NOT NULL,
    seed INTEGER NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL, max_attempts INTEGER NOT NULL,
    created REAL NOT NULL, ended REAL, cause TEXT, detail TEXT, rewards TEXT NOT NULL,
    changed INTEGER NOT NULL  -- rises over the whole table with every change of status
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
    original TEXT NOT NULL  -- the version before any step, where a line that begins after step 0 starts
);
CREATE TABLE lineages (number INTEGER PRIMARY KEY, after INTEGER NOT NULL);
CREATE TABLE steps (
    lineage INTEGER NOT NULL, number INTEGER NOT NULL, metrics TEXT NOT NULL, checkpoint TEXT, digest TEXT,
    superseded INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (lineage, number)
);
CREATE TABLE consumed (
    lineage INTEGER NOT NULL, number INTEGER NOT NULL, rollout TEXT NOT NULL,
    position INTEGER,  -- in the step's list; NULL: named only among the dropped
    dropped TEXT,      -- why it carried no loss
    PRIMARY KEY (lineage, number, rollout)
) WITHOUT ROWID;
CREATE INDEX consumed_rollout ON consumed (rollout);
"""

Row = Sequence[Any]

ROLLOUT = "id, grp, member, task, mode, seed, status, attempts, max_attempts, created, ended, cause, detail, rewards"
ATTEMPT = ", ".join(Attempt.__struct_fields__)
TURN = ", ".join(Turn.__struct_fields__)
EVENT = ", ".join(Event.__struct_fields__)
POLICY = ", ".join(Policy.__struct_fields__)
STEP = "lineage, number, metrics, checkpoint, digest, superseded, time"

_JSON_FIELDS = ("task", "rewards", "versions", "sampling", "requested", "messages", "answer", "data", "metrics")
_ARRAYS = {"prompt_ids": "i", "response_ids": "i", "logprobs": "d"}


def marks(columns: str) -> str:
    """`marks("a, b") == "?, ?"`"""
    return ", ".join("?" * len(columns.split(",")))


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def to_blob(code: str, values: Sequence[int] | Sequence[float]) -> bytes:
    packed: array[Any] = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def from_blob(code: str, blob: bytes) -> list[Any]:
    packed: array[Any] = array(code)
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def encode(record: Rollout | Turn | Event | Policy) -> list[Any]:
    """The record's fields in their order, as the columns above hold them."""
    return [_column(name, getattr(record, name)) for name in record.__struct_fields__]


def _column(name: str, value: Any) -> Any:
    if name in _ARRAYS:
        return to_blob(_ARRAYS[name], value)
    return to_json(value) if name in _JSON_FIELDS else value


def _fields(record: type[msgspec.Struct], row: Row) -> dict[str, Any]:
    fields = dict(zip(record.__struct_fields__, row, strict=True))
    for name in _JSON_FIELDS:
        if name in fields:
            fields[name] = msgspec.json.decode(fields[name])
    for name, code in _ARRAYS.items():
        if name in fields:
            fields[name] = from_blob(code, fields[name])
    return fields


def rollout(row: Row) -> Rollout:
    return msgspec.convert(_fields(Rollout, row), Rollout)


def attempt(row: Row) -> Attempt:
    return Attempt(**dict(zip(Attempt.__struct_fields__, row, strict=True)))


def turn(row: Row) -> Turn:
    return msgspec.convert(_fields(Turn, row), Turn)


def event(row: Row) -> Event:
    return Event(**_fields(Event, row))


def policy(row: Row) -> Policy:
    return Policy(**dict(zip(Policy.__struct_fields__, row, strict=True)))


def step(row: Row, consumed: Sequence[Row]) -> Step:
    """`consumed`: (rollout, position, dropped) of the step, by position."""
    lineage, number, metrics, checkpoint, digest, superseded, time = row
    return Step(
        lineage=lineage,
        number=number,
        rollouts=[rollout for rollout, position, _ in consumed if position is not None],
        dropped={rollout: reason for rollout, _, reason in consumed if reason is not None},
        metrics={k: math.nan if v is None else v for k, v in msgspec.json.decode(metrics).items()},  # JSON has no NaN
        checkpoint=checkpoint,
        digest=digest,
        superseded=bool(superseded),
        time=time,
    )


def reward(data: dict[str, Any]) -> Reward:
    """The reward an event carries. `BadReward` names what is wrong with it.

    >>> reward({"name": "format", "value": True})
    Reward(name='format', value=1.0, turn=None, agent=None)
    """
    value = data.get("value")
    if isinstance(value, bool):
        data = {**data, "value": float(value)}
    try:
        found = msgspec.convert(data, Reward)
    except msgspec.ValidationError as error:
        raise BadReward(
            f"a reward event does not fit: {error}; it looks like {{'name': 'reward', 'value': 1.0}}"
        ) from None
    return checked(found)


def checked(given: Reward) -> Reward:
    if given.wrong:
        raise BadReward(given.wrong)
    return given
