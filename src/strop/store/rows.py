"""How records lie in SQL: each record to a row and back, the same in every database.

Anyone can open the store with any SQL tool. Messages, data and metrics are JSON text; token ids are little-endian int32
and logprobs little-endian float64, so that they come back bit for bit (`numpy.frombuffer` reads them too).
"""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec.structs import replace

from strop.errors import BadReward, StoreError
from strop.types import Attempt, Event, Policy, Reward, Rollout, Step, Turn

Row = Sequence[Any]

_COLUMN = {"group": "grp"}
"""Fields whose names mean something else in SQL."""


def _columns(record: type[msgspec.Struct]) -> str:
    return ", ".join(_COLUMN.get(name, name) for name in record.__struct_fields__)


ROLLOUT = _columns(Rollout)
ATTEMPT = _columns(Attempt)
TURN = _columns(Turn)
EVENT = _columns(Event)
POLICY = _columns(Policy)
STEP = "lineage, number, metrics, checkpoint, digest, superseded, time"

_JSON = frozenset(
    {"task", "rewards", "retries", "versions", "sampling", "requested", "messages", "answer", "data", "metrics"}
)
_ARRAYS = {"prompt_ids": "i", "response_ids": "i", "logprobs": "d"}


def marks(columns: str) -> str:
    """`marks("a, b") == "?, ?"`"""
    return ", ".join("?" * len(columns.split(",")))


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def text(value: str | None) -> str | None:
    """What people or programs wrote, without the characters that no database takes.

    >>> text("a" + chr(0) + "b")
    'a\\\\x00b'
    """
    return None if value is None else value.replace("\0", "\\x00").encode(errors="replace").decode()


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


def encode(record: Rollout | Turn | Event | Policy | Attempt) -> list[Any]:
    """The record's fields in their order, as the columns above hold them. `StoreError` names the field that cannot."""
    row: list[Any] = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        try:
            row.append(_column(name, value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StoreError(f"{name!r} of a {type(record).__name__.lower()} cannot be stored: {error}") from None
    return row


def _column(name: str, value: Any) -> Any:
    if name in _ARRAYS:
        return to_blob(_ARRAYS[name], value)
    if name in _JSON:
        return to_json(value)
    return text(value) if isinstance(value, str) else value


def _decoders(record: type[msgspec.Struct]) -> dict[int, Callable[[Any], Any]]:
    """How the columns that hold more than one value are read, by their place."""
    found: dict[int, Callable[[Any], Any]] = {}
    for place, (name, kind) in enumerate(get_type_hints(record).items()):
        if name in _ARRAYS:
            found[place] = functools.partial(from_blob, _ARRAYS[name])
        elif name in _JSON:
            found[place] = msgspec.json.Decoder(kind).decode
    return found


_DECODERS = {record: _decoders(record) for record in (Rollout, Attempt, Turn, Event, Policy)}
R = TypeVar("R", Rollout, Attempt, Turn, Event, Policy)


def decode(record: type[R], row: Row) -> R:
    values = list(row)
    for place, read in _DECODERS[record].items():
        values[place] = read(values[place])
    return record(**dict(zip(record.__struct_fields__, values, strict=True)))


def rollout(row: Row) -> Rollout:
    """A reward too large to train on, recorded before such were refused, is read as what it would come to now."""
    found = decode(Rollout, row)
    huge = next((reward for reward in found.rewards if reward.huge), None)
    if huge is None:
        return found
    return replace(found, status="failed", cause="bad_reward", detail=huge.wrong, rewards=())


def attempt(row: Row) -> Attempt:
    return decode(Attempt, row)


def turn(row: Row) -> Turn:
    return decode(Turn, row)


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
