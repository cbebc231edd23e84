"""OpenAI's responses: a conversation as a list of items, which the agent sends whole or lets the gateway remember.

Parameters are treated as in `chat`. Everything is recorded, so `store` may say what it likes. `max_tool_calls` counts
what the API's maker runs, and is accepted. `instructions` are a system message before all others, for this response
only: one that goes on from it (`previous_response_id`) brings its own. `responses_tools`, `responses_items` and
`responses_stream` are part of this dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from strop.gateway.dialects.base import AnswerInfo, AnswerSchema, ApiError, ChoiceDone, Json, ModelRequest
from strop.gateway.dialects.fields import NOT_SERVED, read_fields, read_object, unsupported
from strop.gateway.dialects.openai import OpenAIDialect, read_schema
from strop.gateway.dialects.proxied import ProxiedAnswer, ProxiedChoice, join_parts, read_finish
from strop.gateway.dialects.responses_items import (
    check_results,
    find_more_tools,
    join_name,
    list_referred,
    read_input,
    recall,
)
from strop.gateway.dialects.responses_stream import INPUT, ResponseEvents, write
from strop.gateway.dialects.responses_tools import read_tools
from strop.types import Turn

FIELDS: Json = {
    "model": str,
    "input": str | list[dict[str, Any]],
    "instructions": str,
    "previous_response_id": str,
    "tools": list[dict[str, Any]],
    "tool_choice": Any,
    "parallel_tool_calls": bool,
    "stream": bool,
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "max_output_tokens": Annotated[int, Meta(ge=1)],
    "include": list[str],
    "reasoning": dict[str, str | None],
    "text": dict[str, Any],
    "metadata": dict[str, str],
    "client_metadata": dict[str, Any],
    "user": str,
    "store": bool,
    "service_tier": str,
    "max_tool_calls": int,
    "image": dict[str, Any],
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict[str, Any],
    "safety_identifier": str,
    "chat_template_kwargs": dict[str, Any],
}

HARMLESS: dict[str, Any] = {
    "background": False,
    "truncation": "disabled",
    "top_logprobs": 0,
    "stream_options": {"include_obfuscation": False},
}
"""Accepted with the one value that changes nothing, which some clients always send."""

REASONING = frozenset({"effort", "summary", "generate_summary", "context"})
"""`effort` is treated as chat's reasoning_effort; reasoning is given out as it is, whatever summary is asked for. Which
of it the model is shown again (`context`) the policy's history says."""

INCLUDE = {"message.output_text.logprobs": True, "reasoning.encrypted_content": False}
"""What can be included, and whether it asks for logprobs. Reasoning is not encrypted, so nothing is missing."""

RECORDED = (
    "temperature",
    "top_p",
    "model",
    "max_output_tokens",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "client_metadata",
    "chat_template_kwargs",
)
ECHOED = (
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "max_output_tokens",
    "reasoning",
    "metadata",
    "user",
    "store",
    "prompt_cache_key",
    "safety_identifier",
    "text",
)
"""What a response repeats of its request."""


class Responses(OpenAIDialect):
    path = "responses"
    count_path = "responses/input_tokens"
    not_offered = MappingProxyType(
        {
            "responses/": "Responses are recorded but not given out again, cancelled or deleted by id. Fix: keep what "
            "you were answered, or go on from it with previous_response_id"
        }
    )

    def read(self, body: bytes) -> ModelRequest:
        return _read(body)

    def recall(self, request: ModelRequest, answers: Mapping[str, Json]) -> ModelRequest:
        messages = recall(request.messages, answers)
        if request.previous is None:
            check_results(messages)
        return replace(request, messages=messages)

    def continue_from(self, request: ModelRequest, turn: Turn) -> ModelRequest:
        """Instructions are for one response: the old ones go, the new ones stand before everything."""
        old, new = "instructions" in turn.requested, "instructions" in request.requested
        said = turn.answer | {"turn": turn.id}
        joined = [*request.messages[:new], *turn.messages[old:], said, *request.messages[new:]]
        check_results(joined)
        return replace(request, messages=joined)

    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
        return write(answer, choices[0], request)

    def stream(self, request: ModelRequest) -> ResponseEvents:
        return ResponseEvents(request)

    def write_count(self, num_tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def read_answer(self, data: Json, answer: ProxiedAnswer) -> None:
        """The last event of a stream has all of it."""
        kind = data.get("type") or ""
        if kind == "response.output_text.delta":
            answer.choice().text += data["delta"]
        whole = data.get("response") if kind in ENDS else None if kind else data
        if whole is not None:
            _read_response(whole, answer)


def _read(body: bytes) -> ModelRequest:
    fields = read_fields(read_object(body), FIELDS, HARMLESS)
    if not fields.get("input"):
        raise ApiError(
            "input is required. Fix: give text, or a list of items", param="input", code="missing_required_parameter"
        )
    _check_reasoning(fields.get("reasoning", {}))
    schema = _read_text(fields.get("text", {}))
    for name in fields.get("include", []):
        if name not in INCLUDE:
            raise unsupported("include", f"{name!r} is not served. Fix: use one of {', '.join(INCLUDE)}")
    messages = read_input(fields["input"])
    tools = read_tools([*fields.get("tools", []), *find_more_tools(fields["input"])])
    choice, tool = _tool_choice(fields.get("tool_choice", "auto"), tools.shown)
    previous = fields.get("previous_response_id")
    refers = list_referred(messages)
    if previous is None and not refers:
        check_results(messages)
    requested = {name: fields[name] for name in RECORDED if name in fields}
    if "instructions" in fields:
        messages = [{"role": "system", "content": fields["instructions"]}, *messages]
        requested["instructions"] = True
    return ModelRequest(
        messages=messages,
        schema=schema,
        tools=tools.shown,
        tool_choice=choice,
        tool=tool,
        strict=tools.strict,
        one_call=not fields.get("parallel_tool_calls", True),
        previous=previous,
        refers=refers,
        variables=fields.get("chat_template_kwargs", {}),
        effort=fields.get("reasoning", {}).get("effort"),
        max_tokens=fields.get("max_output_tokens"),
        logprobs=any(INCLUDE[name] for name in fields.get("include", [])),
        stream=fields.get("stream", False),
        requested=requested,
        dropped=tools.dropped,
        options={
            "echoed": {name: fields[name] for name in ECHOED if name in fields},
            "namespaces": tools.namespaces,
            "custom": tools.custom,
        },
    )


def _check_reasoning(reasoning: dict[str, str | None]) -> None:
    for name, value in reasoning.items():
        if value is not None and name not in REASONING:
            raise unsupported(f"reasoning.{name}", NOT_SERVED)


def _read_text(text: Json) -> AnswerSchema | None:
    if unknown := set(text) - {"format", "verbosity"}:
        raise unsupported(f"text.{min(unknown)}", NOT_SERVED)
    if not isinstance(text.get("verbosity"), str | None):
        raise ApiError("text.verbosity is not a word. Fix: give one", param="text.verbosity", code="invalid_value")
    if not isinstance(text.get("format", {}), dict):
        raise ApiError("text.format is not an object. Fix: give one", param="text.format", code="invalid_value")
    return read_schema(text.get("format", {"type": "text"}), "text.format", nested=False)


def _tool_choice(choice: Any, tools: Sequence[Json]) -> tuple[Literal["auto", "none", "required"], str | None]:
    if choice in ("auto", "none"):
        return choice, None
    named: list[str] = [tool["function"]["name"] for tool in tools]
    if choice == "required" and named:
        return "required", None
    if isinstance(choice, dict):
        choice = cast(Json, choice)
        if choice.get("type") in ("function", "custom") and choice.get("name") in named:
            return "required", choice["name"]
    raise ApiError(
        f"tool_choice cannot be followed: the tools are {', '.join(named) or 'none'}. Fix: give "
        '"auto", "none", "required", or {"type": "function", "name": ...} with the name of one',
        param="tool_choice",
        code="invalid_value",
    )


# -- a provider's answer -----------------------------------------------------------------------------------------------

ENDS = ("response.completed", "response.incomplete", "response.failed")


def _read_response(response: Json, answer: ProxiedAnswer) -> None:
    choice = ProxiedChoice()
    answer.ended, answer.choices, answer.usage = True, {0: choice}, response.get("usage") or {}
    for place, item in enumerate(response.get("output") or ()):
        if item.get("type") == "function_call":
            name = join_name(item.get("namespace"), item.get("name") or "")
            choice.add_call(place, item.get("call_id"), name, item.get("arguments"))
        elif item.get("type") == "custom_tool_call":
            name, given = join_name(item.get("namespace"), item.get("name") or ""), {INPUT: item.get("input")}
            choice.add_call(place, item.get("call_id"), name, msgspec.json.encode(given).decode())
        elif item.get("type") == "message":
            choice.text += join_parts(item.get("content"))
        elif item.get("type") == "reasoning":
            choice.reasoning += join_parts(item.get("content") or item.get("summary"))
    details: Json = response.get("incomplete_details") or {}
    why = details.get("reason") or ("tool_calls" if choice.calls else "stop")
    choice.finish = "error" if response.get("status") == "failed" else read_finish(why)
