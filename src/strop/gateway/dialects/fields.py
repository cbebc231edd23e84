"""What dialects have in common: reading a body field by field, and OpenAI's shapes of errors and events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from strop.gateway.dialects.base import Json, Refused


def read_object(body: bytes) -> Json:
    """A JSON object without the fields that are null."""
    try:
        raw = msgspec.json.decode(body, type=Json)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"the body is not a JSON object: {error}") from None
    return {name: value for name, value in raw.items() if value is not None}


NULL = msgspec.Raw(b"null")
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_parts(body: bytes) -> dict[str, msgspec.Raw]:
    """A JSON object without the fields that are null, each still as it came."""
    try:
        return {name: part for name, part in _PARTS.decode(body).items() if part != NULL}
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"the body is not a JSON object: {error}") from None


def read_fields(raw: Json, fields: Json, harmless: Json) -> Json:
    """The fields of a body, each of its type; those in `harmless` are accepted with that one value."""
    found: Json = {}
    for name, value in raw.items():
        if name in harmless:
            if value != harmless[name]:
                raise unsupported(name, f"only {json.dumps(harmless[name])} is served")
        elif name not in fields:
            raise unsupported(name, "it is not served")
        else:
            try:
                found[name] = msgspec.convert(value, fields[name])
            except msgspec.ValidationError as error:
                raise Refused(f"{name}: {error}", param=name, code="invalid_value") from None
    return found


def read_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise Refused("stop strings must not be empty", param="stop")
    return stops


def unsupported(param: str, why: str) -> Refused:
    return Refused(f"unsupported parameter {param!r}: {why}", param=param, code="unsupported_parameter")


class ToolFunction(Struct):
    name: Annotated[str, Meta(min_length=1)]


class Tool(Struct):
    type: Literal["function"]
    function: ToolFunction


def check_tool(tool: Json, where: str) -> None:
    try:
        msgspec.convert(tool, Tool)
    except msgspec.ValidationError as error:
        raise Refused(
            f'{where}: {error}; a tool is {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
            code="invalid_value",
        ) from None


def error(refused: Refused) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode(error_body(refused))


def error_body(refused: Refused) -> Json:
    return {"error": {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}}


def event(body: Json) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
