"""What OpenAI's APIs have in common: errors, events, parameters, and how their providers' answers are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from strop.gateway.dialects.base import AnswerSchema, ApiError, Dialect, Json
from strop.gateway.dialects.fields import NOT_SERVED, Schema, find_facts, unsupported
from strop.gateway.dialects.proxied import ProxiedAnswer, join_parts, read_finish

DRAWN: Json = {
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "top_k": Annotated[int, Meta(ge=-1)],
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "presence_penalty": Annotated[float, Meta(ge=-2, le=2)],
    "frequency_penalty": Annotated[float, Meta(ge=-2, le=2)],
    "repetition_penalty": Annotated[float, Meta(gt=0)],
    "seed": int,
}
"""How chat completions and completions ask for tokens to be drawn: recorded, and overruled by the policy's settings."""


class OpenAIDialect(Dialect):
    """An API with OpenAI's errors, and its answers unless it reads them itself."""

    forwarded = (b"openai-beta",)

    def error(self, refused: ApiError) -> bytes:
        return msgspec.json.encode(error_body(refused))

    def error_event(self, refused: ApiError) -> bytes:
        flat = {"type": "error", "code": refused.code, "message": refused.message, "param": refused.param}
        return b"event: error\n" + event(flat | error_body(refused))

    def read_answer(self, data: Json, answer: ProxiedAnswer) -> None:
        """Chat completions and completions, whole or in chunks."""
        answer.usage = data.get("usage") or answer.usage
        for item in data.get("choices") or ():
            choice = answer.choice(item.get("index", 0))
            part: Json = item.get("message") or item.get("delta") or {"content": item.get("text")}
            choice.text += join_parts(part.get("content"))
            choice.reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
            for place, call in enumerate(part.get("tool_calls") or ()):
                about = call.get("function") or {}
                choice.add_call(call.get("index", place), call.get("id"), about.get("name"), about.get("arguments"))
            if item.get("finish_reason"):
                choice.finish = read_finish(item["finish_reason"])


def error_body(refused: ApiError) -> Json:
    return {"error": {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}}


def event(body: Json) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def read_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise ApiError("stop strings must not be empty. Fix: leave out those that are", param="stop")
    return stops


def read_stream_options(options: Json) -> bool:
    """Whether a stream ends with what it used."""
    if options.get("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", "only false is served. Fix: leave it out")
    if unknown := set(options) - {"include_usage", "include_obfuscation"}:
        raise unsupported(f"stream_options.{min(unknown)}", NOT_SERVED)
    usage = options.get("include_usage")
    if not isinstance(usage, bool | None):
        raise ApiError(
            "stream_options.include_usage is neither true nor false. Fix: give one of them",
            param="stream_options.include_usage",
            code="invalid_value",
        )
    return bool(usage)


class ToolFunction(Struct):
    name: Annotated[str, Meta(min_length=1)]
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionTool(Struct):
    type: Literal["function"]
    function: ToolFunction


def check_tools(tools: list[Json]) -> None:
    facts = find_facts(tools)
    if facts and "checked" in facts:
        return
    for i, tool in enumerate(tools):
        check_tool(tool, f"tools[{i}]")
    if facts is not None:
        facts["checked"] = True


def check_tool(tool: Json, where: str) -> None:
    try:
        msgspec.convert(tool, FunctionTool)
    except msgspec.ValidationError as error:
        raise ApiError(
            f'{where}: {error}. Fix: write a tool as {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
            code="invalid_value",
        ) from None


class _JsonSchema(Struct, forbid_unknown_fields=True):
    """`name`, `description` and `strict` change nothing: a schema is held to either way."""

    schema: Json
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _Nested(Struct, forbid_unknown_fields=True):
    json_schema: _JsonSchema

    @property
    def schema(self) -> Json:
        return self.json_schema.schema


def read_schema(given: Json, param: str, *, nested: bool) -> AnswerSchema | None:
    """What answers are to be, from {"type": "text"}, "json_object" or "json_schema" with the schema, which may be
    `nested` in a field of its own."""
    kind = given.get("type")
    if kind == "text" and len(given) == 1:
        return None
    if kind == "json_object" and len(given) == 1:
        return AnswerSchema({"type": "object"}, param)
    if kind == "json_schema":
        fields: Any = {name: value for name, value in given.items() if name != "type"}
        try:
            return AnswerSchema(msgspec.convert(fields, _Nested if nested else _JsonSchema).schema, param)
        except msgspec.ValidationError as error:
            raise ApiError(f"{param}: {error}. Fix: give it a schema", param=param, code="invalid_value") from None
    raise unsupported(param, 'its type is one of "text", "json_object" and "json_schema". Fix: use one of these')
