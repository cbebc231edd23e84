"""How records lie in SQL: each record to a row and back, the same in every database.

Anyone can open the store with any SQL tool. Messages, data and metrics are JSON text; token ids are little-endian int32
and logprobs little-endian float64, so that they come back bit for bit (`numpy.frombuffer` reads them too). A field's
type says how it lies (`choose_column`). Turns are told in `turns.py`: their rows hold what each adds.
"""

from __future__ import annotations

import functools
import math
import struct
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from strop.errors import BadExclusion, BadReward, StoreError, StropError
from strop.types import MAX_REWARD, Attempt, Event, Exclusion, Policy, Reward, Rollout, Step, Turn

Row = Sequence[Any]
_Said = TypeVar("_Said")

_COLUMN = {"group": "grp"}
"""Fields whose names mean something else in SQL."""


def _columns(record: type[Struct]) -> str:
    return ", ".join(_COLUMN.get(name, name) for name in record.__struct_fields__)


ROLLOUT = _columns(Rollout)
ATTEMPT = _columns(Attempt)
EVENT = _columns(Event)
POLICY = _columns(Policy)
STEP = "lineage, number, metrics, checkpoint, digest, superseded, time"


class ColumnKind(Struct, frozen=True):
    """How a field lies in a column: the column's SQL type, and what writes and reads a value where it is not stored as
    it is."""

    sql: str
    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None


def choose_column(hint: Any) -> ColumnKind:
    """The column for a field of this type.

    >>> [choose_column(hint).sql for hint in (int, str | None, list[float], dict[str, int])]
    ['BIGINT NOT NULL', 'TEXT', 'BLOB NOT NULL', 'TEXT NOT NULL']
    """
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    if type(None) in options:
        given = choose_column(Union[tuple(option for option in options if option is not type(None))])  # noqa: UP007
        write = text if given.write is text else _unless_none(given.write)
        return ColumnKind(given.sql.removesuffix(" NOT NULL"), write, _unless_none(given.read))
    if hint is str or get_origin(hint) is Literal:
        return ColumnKind("TEXT NOT NULL", text)
    if hint in _PLAIN:
        return _PLAIN[hint]
    return ColumnKind("TEXT NOT NULL", to_json, msgspec.json.Decoder(hint).decode)


def _unless_none(convert: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


@functools.cache
def kinds(record: type[Struct]) -> dict[str, ColumnKind]:
    hints = get_type_hints(record, include_extras=True)
    return {name: choose_column(hints[name]) for name in record.__struct_fields__}


@functools.cache
def placeholders(columns: str) -> str:
    """`placeholders("a, b") == "?, ?"`"""
    return ", ".join("?" * len(columns.split(",")))


_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> str:
    return _encode(value).decode()


def text(value: str | None) -> str | None:
    """What people or programs wrote, without the characters that no database takes.

    >>> text("a" + chr(0) + "b")
    'a\\\\x00b'
    """
    if value is None or (value.isascii() and "\0" not in value):
        return value
    return value.replace("\0", "\\x00").encode(errors="replace").decode()


def to_blob(code: str, values: Sequence[int] | Sequence[float]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except struct.error as error:
        raise ValueError(str(error)) from None


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, struct.error)
"""What reading a column raises that was not written here, or was damaged since."""


def from_blob(code: str, blob: bytes) -> list[Any]:
    return list(struct.unpack(f"<{len(blob) // struct.calcsize(code)}{code}", blob))


_PLAIN: dict[Any, ColumnKind] = {
    bool: ColumnKind("BIGINT NOT NULL", int, bool),
    int: ColumnKind("BIGINT NOT NULL"),
    float: ColumnKind("DOUBLE PRECISION NOT NULL"),
    list[int]: ColumnKind("BLOB NOT NULL", functools.partial(to_blob, "i"), functools.partial(from_blob, "i")),
    list[float]: ColumnKind("BLOB NOT NULL", functools.partial(to_blob, "d"), functools.partial(from_blob, "d")),
}


def encode(record: Rollout | Turn | Event | Policy | Attempt) -> list[Any]:
    """The record's fields in their order, as the columns above hold them. `StoreError` names the field that cannot."""
    row: list[Any] = []
    name = ""
    try:
        for name, write in _writers(type(record)):
            value = getattr(record, name)
            row.append(value if write is None else write(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"{name!r} of a {type(record).__name__.lower()}"
        raise StoreError(f"{what} cannot be stored: {error}. Fix: use plain JSON types") from None
    return row


@functools.cache
def _writers(record: type[Struct]) -> list[tuple[str, Callable[[Any], Any] | None]]:
    return [(name, kind.write) for name, kind in kinds(record).items()]


R = TypeVar("R", Rollout, Attempt, Event, Policy)


def decode(record: type[R], row: Row) -> R:
    values = list(row)
    for place, read in _readers(record):
        values[place] = read(values[place])
    return record(**dict(zip(record.__struct_fields__, values, strict=True)))


@functools.cache
def _readers(record: type[Struct]) -> list[tuple[int, Callable[[Any], Any]]]:
    """How the columns that are not read as they are stored are read, by their place."""
    return [(place, kind.read) for place, kind in enumerate(kinds(record).values()) if kind.read is not None]


def rollout(row: Row) -> Rollout:
    """A reward too large to train on, recorded before such were refused, is read as what it would come to now."""
    found = decode(Rollout, row)
    huge = next((reward for reward in found.rewards if reward.huge), None)
    if huge is None:
        return found
    return replace(found, status="failed", cause="bad_reward", detail=huge.wrong, rewards=())


_JSON_PLACES = [place for place, kind in enumerate(kinds(Rollout).values()) if kind.write is to_json]
_JsonRollout = msgspec.defstruct("_JsonRollout", Rollout.__struct_fields__, gc=False)


class _Value(Struct, gc=False):
    value: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]


_REWARDS = Rollout.__struct_fields__.index("rewards")
_check_values = msgspec.json.Decoder(list[list[_Value]]).decode


def rollouts_json(found: Sequence[Row]) -> bytes:
    """Rows of rollouts as a JSON array, as `encode` would make it of the records: columns that hold JSON go into it as
    they are. A damaged one is noticed by who decodes the page, as it would be here."""
    try:
        _check_values("[" + ",".join([row[_REWARDS] for row in found]) + "]")
    except msgspec.ValidationError:  # one is too large
        return _encode([rollout(row) for row in found])
    page: list[Struct] = []
    for row in found:
        values = list(row)
        for place in _JSON_PLACES:
            values[place] = msgspec.Raw(values[place])
        page.append(_JsonRollout(*values))
    return _encode(page)


def attempt(row: Row) -> Attempt:
    return decode(Attempt, row)


def event(row: Row) -> Event:
    return decode(Event, row)


def policy(row: Row) -> Policy:
    return decode(Policy, row)


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
    return check_reward(_convert(data, Reward, BadReward, "a reward event", "{'name': 'reward', 'value': 1.0}"))


def exclusion(data: dict[str, Any]) -> Exclusion:
    """The exclusion an event carries. `BadExclusion` names what is wrong with it."""
    like = "{'turn': 'g1.0/1/0', 'reason': 'title'}"
    found = _convert(data, Exclusion, BadExclusion, "an exclude event", like)
    if found.wrong:
        raise BadExclusion(f"{found.wrong}. Fix: give the id of the model's answer and one plain word")
    return found


def _convert(data: dict[str, Any], kind: type[_Said], refused: type[StropError], what: str, like: str) -> _Said:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise refused(f"{what} does not fit: {error}. Fix: write it as {like}") from None


def check_event(event: Event) -> None:
    """Refuse what could not be counted later."""
    if event.kind == "reward":
        reward(event.data)
    elif event.kind == "exclude":
        exclusion(event.data)


def check_reward(given: Reward) -> Reward:
    if given.wrong:
        raise BadReward(given.wrong)
    return given
