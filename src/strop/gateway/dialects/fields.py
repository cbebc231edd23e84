"""What dialects have in common: reading a body field by field, and OpenAI's shapes of errors and events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from strop.gateway.dialects.base import Json, Refused

DRAWN: Json = {
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "top_k": Annotated[int, Meta(ge=-1)],
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "presence_penalty": Annotated[float, Meta(ge=-2, le=2)],
    "frequency_penalty": Annotated[float, Meta(ge=-2, le=2)],
    "seed": int,
}
"""How chat completions and completions ask for tokens to be drawn: recorded, and overruled by the policy's settings."""


OWN = frozenset({"chat_template_kwargs", "logit_bias", "metadata"})
"""Parameters whose keys are the agent's own: null is a value there."""


def read_object(body: bytes) -> Json:
    """A JSON object without the fields that are null, which is how many clients say nothing."""
    try:
        raw = msgspec.json.decode(body, type=Json)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"the body is not a JSON object: {error}") from None
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
    items stay as they came. A body that does not fit is read again, field by field, to say what is wrong with it; if
    that is only null for a field that nobody knows, nothing is."""

    def __init__(self, fields: Json, harmless: Json, raw: Sequence[str] = ()) -> None:
        self._fields, self._harmless = fields, harmless
        kinds: Json = {**fields, **dict.fromkeys(harmless, Any), **dict.fromkeys(raw, list[msgspec.Raw])}
        named = [(name, kind | None, None) for name, kind in kinds.items()]
        body = msgspec.defstruct("Body", named, forbid_unknown_fields=True)
        self._decode = msgspec.json.Decoder(body).decode
        self._names = body.__struct_fields__

    def read(self, body: bytes) -> Json:
        try:
            if not body.isascii():
                body.decode()
            got = self._decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raw = read_object(body)
            read_fields(raw, self._fields, self._harmless)
            try:
                got = self._decode(msgspec.json.encode(raw))
            except (msgspec.MsgspecError, RecursionError):
                raise Refused("the body is not a JSON object that can be read") from None
        found = without_nulls({name: getattr(got, name) for name in self._names})
        for name in self._harmless.keys() & found.keys():
            if found.pop(name) != self._harmless[name]:
                raise unsupported(name, f"only {json.dumps(self._harmless[name])} is served")
        return found


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


def read_stream_options(options: Json) -> bool:
    """Whether a stream ends with what it used."""
    if options.get("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", "only false is served")
    if unknown := set(options) - {"include_usage", "include_obfuscation"}:
        raise unsupported(f"stream_options.{min(unknown)}", "it is not served")
    usage = options.get("include_usage")
    if not isinstance(usage, bool | None):
        raise Refused(
            "stream_options.include_usage is true or false", param="stream_options.include_usage", code="invalid_value"
        )
    return bool(usage)


def unsupported(param: str, why: str) -> Refused:
    return Refused(f"unsupported parameter {param!r}: {why}", param=param, code="unsupported_parameter")


class Schema(Struct):
    """As much of a JSON schema as tells what an argument is: it is read while the model writes a call. The rest is
    between the agent and the model."""

    type: str | list[str] | None = None
    properties: dict[str, Schema | bool] | None = None
    items: Schema | bool | list[Schema | bool] | None = None
    anyOf: list[Schema | bool] | None = None
    oneOf: list[Schema | bool] | None = None
    allOf: list[Schema | bool] | None = None


class ToolFunction(Struct):
    name: Annotated[str, Meta(min_length=1)]
    parameters: Schema | None = None


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


def check_schema(schema: Json | None, where: str) -> None:
    try:
        msgspec.convert(schema, Schema | None)
    except msgspec.ValidationError as error:
        raise Refused(f"{where} is no JSON schema: {error}", param=where, code="invalid_function_parameters") from None


def error(refused: Refused) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode(error_body(refused))


def error_body(refused: Refused) -> Json:
    return {"error": {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}}


def event(body: Json) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
