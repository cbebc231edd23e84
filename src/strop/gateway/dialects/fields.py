"""Reading a body field by field, which dialects have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from strop.gateway.dialects.base import ApiError, Json

OWN = frozenset({"chat_template_kwargs", "client_metadata", "logit_bias", "metadata"})
"""Parameters whose keys are the agent's own: null is a value there."""

MAX_BYTES, MAX_TABLES = 32 << 10, 128
"""How many bytes a list of tables may have that is remembered, and how many there are."""
REASONS = {
    "top_logprobs": "engines tell the logprob of the sampled token and of no other",
    "logit_bias": "tokens are drawn from the model's own distribution, by which it is trained",
}
"""Why of some parameters only one value is served."""
NOT_SERVED = "it is not served. Fix: leave it out"


def read_object(body: bytes) -> Json:
    """A JSON object without the fields that are null, which is how many clients say nothing."""
    try:
        raw = msgspec.json.decode(body, type=Json)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(f"the body is not a JSON object: {error}. Fix: send one") from None
    return without_nulls(raw)


def without_nulls(fields: Json) -> Json:
    """Parameters without those that are null, within others too. What stands in a list is not looked at.

    >>> without_nulls({"a": None, "b": {"c": None, "d": [None]}})
    {'b': {'d': [None]}}
    """
    return {
        name: without_nulls(cast(Json, value)) if isinstance(value, dict) and name not in OWN else value
        for name, value in fields.items()
        if value is not None
    }


class Fields:
    """The fields of a body that comes often, read at one go; `harmless` as in `read_fields`, `raw` are lists whose
    items stay as they came. `tables` are lists of objects that agents send with every request: the same bytes give the
    same list, which nobody may change. A body that does not fit is read again, field by field, to say what is wrong
    with it; if that is only null for a field that nobody knows, nothing is."""

    def __init__(self, fields: Json, harmless: Json, raw: Sequence[str] = (), tables: Sequence[str] = ()) -> None:
        self._fields, self._harmless, self._tables = fields, harmless, tables
        kinds: Json = {**fields, **dict.fromkeys(harmless, Any), **dict.fromkeys([*raw, *tables], list[msgspec.Raw])}
        named = [(name, kind | None, None) for name, kind in kinds.items()]
        body = msgspec.defstruct("Body", named, forbid_unknown_fields=True)
        self._decode = msgspec.json.Decoder(body).decode
        self._names = body.__struct_fields__

    def read(self, body: bytes) -> Json:
        try:
            if not body.isascii():
                body.decode()
            got = self._read(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raw = read_object(body)
            read_fields(raw, self._fields, self._harmless)
            try:
                got = self._read(msgspec.json.encode(raw))
            except (msgspec.MsgspecError, RecursionError):
                raise ApiError("the body is not a JSON object that can be read. Fix: send one") from None
        given = zip(self._names, astuple(got), strict=True)
        found = without_nulls({name: value for name, value in given if value is not None})
        if not self._harmless.keys().isdisjoint(found):
            for name in self._harmless.keys() & found.keys():
                _check_harmless(name, found.pop(name), self._harmless)
        return found

    def _read(self, body: bytes) -> Any:
        got = self._decode(body)
        for name in self._tables:
            if items := getattr(got, name):
                setattr(got, name, _tables.read(tuple(map(bytes, items))))
        return got


class SharedTables:
    """Lists of JSON objects that were read, and what was found out about each. What is long is read anew each time."""

    def __init__(self) -> None:
        self._read: dict[tuple[bytes, ...], list[Json]] = {}
        self._facts: dict[int, tuple[list[Json], Json]] = {}  # the list too: its id is its own as long as it lives

    def read(self, items: tuple[bytes, ...]) -> list[Json]:
        if (found := self._read.get(items)) is not None:
            return found
        tables = [_decode_table(item) for item in items]
        if sum(map(len, items)) <= MAX_BYTES:
            if len(self._read) >= MAX_TABLES:
                self._read.clear()
                self._facts.clear()
            self._read[items], self._facts[id(tables)] = tables, (tables, {})
        return tables

    def facts(self, tables: object) -> Json | None:
        found = self._facts.get(id(tables))
        return found and found[1]


_decode_table = msgspec.json.Decoder(Json).decode
_tables = SharedTables()
find_facts = _tables.facts
"""What was found out about a list of tables, to be added to; None for a list that will not come again."""


def read_fields(raw: Json, fields: Json, harmless: Json) -> Json:
    """The fields of a body, each of its type; those in `harmless` are accepted with that one value."""
    found: Json = {}
    for name, value in raw.items():
        if name in harmless:
            _check_harmless(name, value, harmless)
        elif name not in fields:
            raise unsupported(name, NOT_SERVED)
        else:
            try:
                found[name] = msgspec.convert(value, fields[name])
            except msgspec.ValidationError as error:
                raise ApiError(f"{name}: {error}", param=name, code="invalid_value") from None
    return found


def _check_harmless(name: str, value: Any, harmless: Json) -> None:
    if value != harmless[name]:
        why = f", since {REASONS[name]}" if name in REASONS else ""
        raise unsupported(name, f"only {json.dumps(harmless[name])} is served{why}. Fix: leave it out")


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(f"unsupported parameter {param!r}: {why}", param=param, code="unsupported_parameter")


def part_code(kind: object) -> str:
    """The code by which a part of a message is refused: images are counted apart from other kinds."""
    return "unsupported_image" if kind in ("image", "image_url", "input_image") else "unsupported_value"


def read_arguments(text: str | None) -> Json | str:
    """A call's arguments; text that is no JSON object stays as it is. NaN, which Python's clients write, is read too.

    >>> read_arguments('{"a": 1}'), read_arguments(""), read_arguments('{"a": '), read_arguments("[]")
    ({'a': 1}, {}, '{"a": ', '[]')
    """
    try:
        return _decode_table((text or "{}").encode())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        read = None
    return cast(Json, read) if isinstance(read, dict) else text or ""


class Schema(Struct):
    """As much of a JSON schema as tells what an argument is: it is read while the model writes a call. The rest is
    between the agent and the model."""

    type: str | list[str] | None = None
    properties: dict[str, Schema | bool] | None = None
    items: Schema | bool | list[Schema | bool] | None = None
    anyOf: list[Schema | bool] | None = None
    oneOf: list[Schema | bool] | None = None
    allOf: list[Schema | bool] | None = None


def check_schema(schema: Json | None, where: str) -> None:
    try:
        msgspec.convert(schema, Schema | None)
    except msgspec.ValidationError as error:
        raise ApiError(
            f"{where} is not a JSON schema: {error}", param=where, code="invalid_function_parameters"
        ) from None
