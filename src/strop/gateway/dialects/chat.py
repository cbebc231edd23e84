"""OpenAI's chat completions.

A parameter is either honoured, recorded and overruled by the policy's settings (temperature, top_p, seed, verbosity),
accepted because it changes nothing (service_tier, prediction, store: all is recorded), or refused by name. None is
dropped in silence. Beside OpenAI's own there are those that servers of open models have in common: top_k, min_p,
repetition_penalty, continue_final_message, chat_template_kwargs, and vLLM's return_token_ids and guided_json.
reasoning_effort switches thinking where the chat template has a variable for it (`PolicyRoute.asked_by`); where it has
none, it is recorded.

Messages may carry keys of their makers' own (`refusal`, `annotations`, ids of a framework): they are not part of what a
model is told, and are ignored. `developer` is a system message. Logprobs have one entry per sampled token, the one that
ended the answer included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from strop.gateway.dialects.base import (
    AnswerInfo,
    AnswerSchema,
    ApiError,
    ChoiceDone,
    Delta,
    Json,
    ModelRequest,
    SampledToken,
    ToolCall,
)
from strop.gateway.dialects.chat_messages import read_messages
from strop.gateway.dialects.fields import Fields, unsupported
from strop.gateway.dialects.openai import (
    DRAWN,
    FunctionTool,
    OpenAIDialect,
    check_tools,
    error_body,
    event,
    read_schema,
    read_stop,
    read_stream_options,
)

FIELDS: Json = {
    "model": str,
    "messages": list[Any],
    "tools": list[dict[str, Any]],
    "tool_choice": Any,
    "parallel_tool_calls": bool,
    "stream": bool,
    "stream_options": dict[str, Any],
    **DRAWN,
    "max_tokens": Annotated[int, Meta(ge=1)],
    "max_completion_tokens": Annotated[int, Meta(ge=1)],
    "stop": str | list[str],
    "n": Annotated[int, Meta(ge=1, le=128)],
    "logprobs": bool,
    "reasoning_effort": str,
    "verbosity": str,
    "user": str,
    "safety_identifier": str,
    "metadata": dict[str, Any],
    "store": bool,
    "service_tier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict[str, Any],
    "prediction": dict[str, Any],
    "response_format": dict[str, Any],
    "guided_json": dict[str, Any],
    "continue_final_message": bool,
    "add_generation_prompt": bool,
    "return_token_ids": bool,
    "chat_template_kwargs": dict[str, Any],
}

HARMLESS: dict[str, Any] = {
    "top_logprobs": 0,
    "logit_bias": {},
    "modalities": ["text"],
}
"""Accepted with the one value that changes nothing, which some clients always send."""

RECORDED = (
    *DRAWN,
    "model",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "verbosity",
    "chat_template_kwargs",
    "response_format",
    "guided_json",
)

_BODY = Fields(FIELDS, HARMLESS, raw=["messages"], tables=["tools"])


class ChatCompletions(OpenAIDialect):
    path = "chat/completions"
    not_offered = MappingProxyType(
        {"chat/completions/": "Stored completions are not given out again. Fix: keep what you were answered"}
    )

    def read(self, body: bytes) -> ModelRequest:
        return _read(body)

    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
        return _write(answer, choices, request)

    def stream(self, request: ModelRequest) -> ChatChunks:
        return ChatChunks(request)


# -- request -----------------------------------------------------------------------------------------------------------


def _read(body: bytes) -> ModelRequest:
    fields = _BODY.read(body)
    if "messages" not in fields:
        raise ApiError("messages is required", param="messages", code="missing_required_parameter")
    if not fields["messages"]:
        raise ApiError("messages is of length 0. Fix: give at least one", param="messages", code="invalid_value")
    messages = read_messages(fields["messages"])
    tools: list[Json] = fields.get("tools", [])
    check_tools(tools)
    choice, tool = _tool_choice(fields.get("tool_choice", "auto"), tools)
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    prefill = ""
    if fields.get("continue_final_message"):
        messages, prefill = _prefill(messages, fields.get("add_generation_prompt", False))
    return ModelRequest(
        messages=messages,
        prefill=prefill,
        schema=_schema(fields),
        tools=tools,
        tool_choice=choice,
        tool=tool,
        strict=frozenset(one["function"]["name"] for one in tools if one["function"].get("strict")),
        one_call=not fields.get("parallel_tool_calls", True),
        variables=fields.get("chat_template_kwargs", {}),
        effort=fields.get("reasoning_effort"),
        stop=read_stop(fields.get("stop", ())),
        max_tokens=min(limits, default=None),
        n=fields.get("n", 1),
        logprobs=fields.get("logprobs", False),
        token_ids=fields.get("return_token_ids", False),
        stream=fields.get("stream", False),
        requested={name: fields[name] for name in RECORDED if name in fields},
        options={"include_usage": read_stream_options(fields.get("stream_options", {}))},
    )


def _tool_choice(choice: Any, tools: Sequence[Json]) -> tuple[Literal["auto", "none", "required"], str | None]:
    if choice in ("auto", "none"):
        return choice, None
    named = [tool["function"]["name"] for tool in tools]
    if choice == "required" and named:
        return "required", None
    try:
        name = msgspec.convert(choice, FunctionTool).function.name
    except msgspec.ValidationError:
        name = None
    if name not in named:
        raise ApiError(
            f"tool_choice cannot be followed: the tools are {', '.join(named) or 'none'}. Fix: give "
            '"auto", "none", "required", or {"type": "function", "function": {"name": ...}} with the name of one',
            param="tool_choice",
            code="invalid_value",
        )
    return "required", name


def _schema(fields: Json) -> AnswerSchema | None:
    schema = read_schema(fields.get("response_format", {"type": "text"}), "response_format", nested=True)
    if "guided_json" not in fields:
        return schema
    if schema is not None:
        raise unsupported("guided_json", "response_format asks for a schema too. Fix: leave one of them out")
    return AnswerSchema(fields["guided_json"], "guided_json")


def _prefill(messages: list[Json], prompted: bool) -> tuple[list[Json], str]:
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or prompted:
        raise ApiError(
            "continue_final_message has no text of the assistant's to go on from. Fix: end messages with one, "
            "and leave out add_generation_prompt",
            param="continue_final_message",
        )
    return messages[:-1], last["content"]


# -- answer ------------------------------------------------------------------------------------------------------------


def _write(answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
    body = _head(answer, "chat.completion") | {
        "choices": [
            {
                "index": done.choice,
                "message": _message(done),
                "logprobs": _logprobs(done.tokens, request),
                "finish_reason": done.finish,
            }
            | ({"token_ids": done.ids} if request.token_ids else {})
            for done in choices
        ],
        "usage": _usage(answer),
    }
    if request.token_ids:
        body["prompt_token_ids"] = answer.prompt_ids[0]
    return msgspec.json.encode(body)


class ChatChunks:
    """A stream of `chat.completion.chunk` objects."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request

    def opening(self, answer: AnswerInfo) -> bytes:
        start = {"role": "assistant", "content": "", "refusal": None}
        prompt: Json = {"prompt_token_ids": answer.prompt_ids[0]} if self._request.token_ids else {}
        return b"".join(self._chunk(answer, i, start, **prompt) for i in range(self._request.n))

    def delta(self, answer: AnswerInfo, delta: Delta) -> bytes:
        change: Json = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text:
            change["content"] = delta.text
        if delta.calls:
            change["tool_calls"] = [{"index": call.position} | _tool_call(call) for call in delta.calls]
        return self._chunk(answer, delta.choice, change, tokens=delta.tokens, ids=delta.ids)

    def closing(self, answer: AnswerInfo, choices: Sequence[ChoiceDone]) -> bytes:
        events = [self._chunk(answer, done.choice, {}, finish=done.finish) for done in choices]
        if self._request.options["include_usage"]:
            events.append(event(_head(answer, "chat.completion.chunk") | {"choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def error(self, refused: ApiError) -> bytes:
        return event(error_body(refused))

    def _chunk(
        self,
        answer: AnswerInfo,
        choice: int,
        delta: Json,
        *,
        tokens: Sequence[SampledToken] = (),
        ids: Sequence[int] = (),
        finish: str | None = None,
        **more: Any,
    ) -> bytes:
        body: Json = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish}
        if ids:
            body["token_ids"] = ids
        if tokens:
            body["logprobs"] = _logprobs(tokens, self._request)
        chunk = _head(answer, "chat.completion.chunk") | {"choices": [body]} | more
        if self._request.options["include_usage"]:
            chunk["usage"] = None
        return event(chunk)


def _message(done: ChoiceDone) -> Json:
    """The assistant's message as it is delivered."""
    body: Json = {"role": "assistant", "content": done.text if done.text or not done.calls else None, "refusal": None}
    if done.reasoning:
        body["reasoning_content"] = done.reasoning
    if done.calls:
        body["tool_calls"] = [_tool_call(call) for call in done.calls]
    return body


def _tool_call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": _write_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


_write_arguments = json.JSONEncoder(ensure_ascii=False).encode


def _head(answer: AnswerInfo, kind: str) -> Json:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: AnswerInfo) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def _logprobs(tokens: Sequence[SampledToken], request: ModelRequest) -> Json | None:
    if not request.logprobs:
        return None
    return {"content": tokens, "refusal": None}
