"""OpenAI's chat completions.

A parameter is either honoured, recorded and overruled by the policy's settings (temperature, top_p, seed), accepted
because it changes nothing, or refused by name. None is dropped in silence.

Messages may carry keys of their makers' own (`refusal`, `annotations`, ids of a framework): they are not part of what a
model is told, and are ignored. `developer` is a system message. Logprobs have one entry per sampled token, the one that
ended the answer included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from strop.gateway.dialects.base import Answer, ChoiceDone, Delta, Refused, Request, SampledToken, ToolCall

Json = dict[str, Any]

FIELDS: Json = {
    "model": str,
    "messages": Annotated[list[dict[str, Any]], Meta(min_length=1)],
    "tools": list[dict[str, Any]],
    "tool_choice": Any,
    "parallel_tool_calls": bool,
    "stream": bool,
    "stream_options": dict[str, Any],
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "max_tokens": Annotated[int, Meta(ge=1)],
    "max_completion_tokens": Annotated[int, Meta(ge=1)],
    "stop": str | list[str],
    "seed": int,
    "n": Annotated[int, Meta(ge=1, le=128)],
    "logprobs": bool,
    "user": str,
    "metadata": dict[str, Any],
    "response_format": dict[str, Any],
}

HARMLESS: dict[str, Any] = {
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "store": False,
}
"""Accepted with the one value that changes nothing, which some clients always send."""

RECORDED = (
    "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "tool_choice",
    "parallel_tool_calls",
)  # fmt: skip

# -- request -----------------------------------------------------------------------------------------------------------


def read(body: bytes) -> Request:
    """The neutral request, or `Refused` with a sentence that names the parameter."""
    try:
        raw = msgspec.json.decode(body, type=Json)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"the body is not a JSON object: {error}") from None
    fields = _fields({name: value for name, value in raw.items() if value is not None})
    if "messages" not in fields:
        raise Refused("messages is required", param="messages", code="missing_required_parameter")
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _unsupported("tool_choice", 'only "auto" and "none" are served')
    if fields.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise _unsupported("response_format", 'only {"type": "text"} is served')
    if unknown := set(fields.get("stream_options", {})) - {"include_usage"}:
        raise _unsupported(f"stream_options.{min(unknown)}", "it is not served")
    tools: list[Json] = fields.get("tools", [])
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools[{i}]")
    stop = fields.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stop):
        raise Refused("stop strings must not be empty", param="stop")
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    return Request(
        messages=read_messages(fields["messages"]),
        tools=tools,
        parse_tools=bool(tools) and choice == "auto",
        one_call=not fields.get("parallel_tool_calls", True),
        stop=stop,
        max_tokens=min(limits, default=None),
        n=fields.get("n", 1),
        logprobs=fields.get("logprobs", False),
        stream=fields.get("stream", False),
        include_usage=bool(fields.get("stream_options", {}).get("include_usage")),
        requested={name: fields[name] for name in RECORDED if name in fields},
    )


def _fields(raw: Json) -> Json:
    found: Json = {}
    for name, value in raw.items():
        if name in HARMLESS:
            if value != HARMLESS[name]:
                raise _unsupported(name, f"only {json.dumps(HARMLESS[name])} is served")
        elif name not in FIELDS:
            raise _unsupported(name, "it is not served")
        else:
            try:
                found[name] = msgspec.convert(value, FIELDS[name])
            except msgspec.ValidationError as error:
                raise Refused(f"{name}: {error}", param=name, code="invalid_value") from None
    return found


def _unsupported(param: str, why: str) -> Refused:
    return Refused(f"unsupported parameter {param!r}: {why}", param=param, code="unsupported_parameter")


def _check_tool(tool: Json, where: str) -> None:
    try:
        msgspec.convert(tool, _Tool)
    except msgspec.ValidationError as error:
        raise Refused(
            f'{where}: {error}; a tool is {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
            code="invalid_value",
        ) from None


class _ToolFunction(Struct):
    name: Annotated[str, Meta(min_length=1)]


class _Tool(Struct):
    type: Literal["function"]
    function: _ToolFunction


class _Part(Struct):
    type: str
    text: str = ""


class _Function(Struct):
    name: str
    arguments: str | None = None


class _Call(Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None


def read_messages(raw: Sequence[Json]) -> list[Json]:
    """Messages in their plain form (see `Request`)."""
    asked: set[str] = set()
    messages: list[Json] = []
    for i, item in enumerate(raw):
        where = f"messages[{i}]"
        try:
            message = msgspec.convert(item, _Message)
        except msgspec.ValidationError as error:
            raise Refused(f"{where}: {error}", param=where, code="invalid_value") from None
        role = "system" if message.role == "developer" else message.role
        plain: Json = {"role": role, "content": _text(message, where)}
        if message.name is not None:
            plain["name"] = message.name
        if role == "assistant":
            plain |= _assistant(message, where)
            asked.update(call.id for call in message.tool_calls or ())
        elif role == "tool":
            if message.tool_call_id not in asked:
                raise Refused(
                    f"{where} answers tool_call_id {message.tool_call_id!r}, which no assistant message before it "
                    "asked for",
                    param=f"{where}.tool_call_id",
                )
            plain["tool_call_id"] = message.tool_call_id
        messages.append(plain)
    return messages


def _assistant(message: _Message, where: str) -> Json:
    if message.function_call is not None or message.audio is not None:
        raise Refused(f"{where} has a function_call or audio: only text and tool_calls are served", param=where)
    plain: Json = {}
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return plain


def _call(call: _Call, where: str) -> Json:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise Refused(
            f"{where}.function.arguments must be a JSON object, written as a string",
            param=f"{where}.function.arguments",
        ) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text(message: _Message, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise Refused(
                f"{where}.content[{i}] is of type {part.type!r}: this model reads text only",
                param=f"{where}.content[{i}]",
            )
    return "".join(part.text for part in message.content)


# -- answer ------------------------------------------------------------------------------------------------------------


def whole(answer: Answer, choices: Sequence[ChoiceDone], request: Request) -> bytes:
    body = _head(answer, "chat.completion") | {
        "choices": [
            {
                "index": done.choice,
                "message": message(done.text, done.calls),
                "logprobs": _logprobs(done.tokens, request),
                "finish_reason": done.finish,
            }
            for done in choices
        ],
        "usage": _usage(answer),
    }
    return msgspec.json.encode(body)


def opening(answer: Answer, request: Request) -> bytes:
    start = {"role": "assistant", "content": "", "refusal": None}
    return b"".join(_chunk(answer, i, start, request) for i in range(request.n))


def delta(answer: Answer, delta: Delta, request: Request) -> bytes:
    change: Json = {"content": delta.text} if delta.text else {}
    if delta.calls:
        change["tool_calls"] = [{"index": call.position} | _tool_call(call) for call in delta.calls]
    return _chunk(answer, delta.choice, change, request, tokens=delta.tokens)


def closing(answer: Answer, choices: Sequence[ChoiceDone], request: Request) -> Iterable[bytes]:
    for done in choices:
        yield _chunk(answer, done.choice, {}, request, finish=done.finish)
    if request.include_usage:
        yield _event(_head(answer, "chat.completion.chunk") | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error(refused: Refused) -> bytes:
    return msgspec.json.encode(_error(refused))


def stream_error(refused: Refused) -> bytes:
    return _event(_error(refused))


def message(text: str, calls: Sequence[ToolCall]) -> Json:
    """The assistant's message as it is delivered."""
    body: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if calls:
        body["tool_calls"] = [_tool_call(call) for call in calls]
    return body


def _tool_call(call: ToolCall) -> Json:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _head(answer: Answer, kind: str) -> Json:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
    }


def _logprobs(tokens: Sequence[SampledToken], request: Request) -> Json | None:
    if not request.logprobs:
        return None
    return {
        "content": [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes, "top_logprobs": []} for t in tokens],
        "refusal": None,
    }


def _chunk(
    answer: Answer,
    choice: int,
    delta: Json,
    request: Request,
    *,
    tokens: Sequence[SampledToken] = (),
    finish: str | None = None,
) -> bytes:
    body: Json = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish}
    if tokens:
        body["logprobs"] = _logprobs(tokens, request)
    chunk = _head(answer, "chat.completion.chunk") | {"choices": [body]}
    if request.include_usage:
        chunk["usage"] = None
    return _event(chunk)


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _error(refused: Refused) -> Json:
    return {"error": {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}}
