"""Anthropic's messages. `messages_stream`, which is part of this dialect, has the blocks and events of answers.

A parameter is either honoured, recorded and overruled by the policy's settings (temperature, top_p, top_k), accepted
because it changes nothing (metadata, service_tier, speed, cache_control wherever it stands; fallbacks, since nothing is
declined), or refused by name.

What has no counterpart in a chat template, and what is done about it:

- `thinking` and `output_config.effort` switch thinking where the chat template has a variable for it, and are accepted
  and recorded where it has none; so is the clearing of old thinking, since what a model sees of that is decided by the
  policy's `history`. `chat_template_kwargs` is taken besides, as other servers of open models do. Thinking is always
  shown whole; its signature is the turn's id, and names the turn that is gone on from. Redacted thinking is ignored.
- Several blocks of text are joined: the assistant's as they are, all others by a line break.
- The text of a `tool_result` with `is_error` begins with "Error: ", unless the tool said so itself.
- Consecutive messages of one role are one turn. Of a user's turn the tool results come first, each a message of its
  own, then the text.
- Tools whose loading is deferred are shown like others. The tool that searches for them is not, and an event says so.
- An assistant's turn at the end is the beginning of the answer, which does not repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from strop.gateway.dialects.base import (
    AnswerInfo,
    AnswerSchema,
    ApiError,
    ChoiceDone,
    Dialect,
    Json,
    ModelRequest,
    turn_named,
)
from strop.gateway.dialects.fields import check_schema, part_code, read_fields, read_object, unsupported
from strop.gateway.dialects.messages_stream import MessageEvents, content, error_body, error_event, stop, usage
from strop.gateway.dialects.proxied import ProxiedAnswer, ProxiedChoice, read_finish

Role = Literal["system", "user", "assistant"]


class _Message(Struct):
    role: Role
    content: str | list[Json]


class _ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


THINKING = {"enabled": True, "adaptive": True, "disabled": False}
"""What `thinking` says about whether to think at all."""


class _OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Json


class _OutputConfig(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: _OutputFormat | None = None


class _ContextManagement(Struct, forbid_unknown_fields=True):
    edits: list[Json] = []


FIELDS: Json = {
    "model": str,
    "messages": Annotated[list[_Message], Meta(min_length=1)],
    "system": str | list[Json],
    "max_tokens": Annotated[int, Meta(ge=1)],
    "stop_sequences": list[Annotated[str, Meta(min_length=1)]],
    "stream": bool,
    "temperature": Annotated[float, Meta(ge=0, le=1)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "top_k": Annotated[int, Meta(ge=0)],
    "tools": list[Json],
    "tool_choice": _ToolChoice,
    "thinking": _Thinking,
    "output_config": _OutputConfig,
    "context_management": _ContextManagement,
    "metadata": Json,
    "service_tier": str,
    "cache_control": Json,
    "chat_template_kwargs": Json,
    "speed": str,
    "inference_geo": str,
    "billing_policy": Json,
    "diagnostics": Json,
    "fallbacks": str | list[Json],
    "fallback_credit_token": Any,
}
HARMLESS: Json = {"mcp_servers": []}
"""Accepted with the one value that changes nothing."""

TOOL_FIELDS: Json = {
    "name": Annotated[str, Meta(min_length=1)],
    "description": str,
    "input_schema": Json,
    "type": str,
    "cache_control": Json,
    "eager_input_streaming": bool,
    "defer_loading": bool,
    "strict": bool,
}
TOOL_HARMLESS: Json = {"allowed_callers": ["direct"], "input_examples": []}

TOOL_SEARCH = "tool_search_tool_"
NO_SEARCH = f"a tool of type '{TOOL_SEARCH}...' has nothing to search for: the model is shown all others"

RECORDED = ("temperature", "top_p", "top_k", "model",
            "max_tokens", "stop_sequences", "tool_choice", "thinking", "output_config", "service_tier",
            "context_management", "chat_template_kwargs")  # fmt: skip


class Messages(Dialect):
    path = "messages"
    count_path = "messages/count_tokens"
    not_offered = MappingProxyType(
        {"messages/batches": "Fix: send the requests of a batch one by one, as many at once as you like"}
    )
    forwarded = (b"anthropic-version", b"anthropic-beta")

    def read(self, body: bytes) -> ModelRequest:
        request = _read(body)
        if request.max_tokens is None:
            raise ApiError("max_tokens is required", param="max_tokens", code="missing_required_parameter")
        return request

    def read_count(self, body: bytes) -> ModelRequest:
        """The same request, which need not say how long the answer may be."""
        return _read(body)

    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
        (done,) = choices
        message = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}
        body = message | {"content": content(answer, done)} | stop(done) | {"usage": usage(answer)}
        return msgspec.json.encode(body)

    def stream(self, request: ModelRequest) -> MessageEvents:
        return MessageEvents()

    def error(self, refused: ApiError) -> bytes:
        return msgspec.json.encode(error_body(refused))

    def error_event(self, refused: ApiError) -> bytes:
        return error_event(refused)

    def is_spoken(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        return any(name == b"anthropic-version" for name, _ in headers)

    def key_headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key}

    def write_model(self, name: str, *, created: float, context: int) -> Json:
        info: Json = {"type": "model", "id": name, "display_name": name, "lifecycle": "active"}
        since = datetime.fromtimestamp(int(created), UTC).isoformat()
        return info | {"created_at": since, "max_input_tokens": context}

    def write_models(self, models: list[Json]) -> Json:
        return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}

    def read_answer(self, data: Json, answer: ProxiedAnswer) -> None:
        _read_answer(data, answer)


# -- request -----------------------------------------------------------------------------------------------------------


def _read(body: bytes) -> ModelRequest:
    raw = read_object(body)
    fields = read_fields(raw, FIELDS, HARMLESS)
    if "messages" not in fields:
        raise ApiError("messages is required", param="messages", code="missing_required_parameter")
    form = fields.get("output_config", _OutputConfig()).format
    for edit in fields.get("context_management", _ContextManagement()).edits:
        if not str(edit.get("type")).startswith("clear_thinking"):
            why = f"{edit.get('type')!r} is not served. Fix: edit the messages yourself"
            raise unsupported("context_management", why)
    given: list[Json] = fields.get("tools", [])
    searches = [str(tool.get("type")).startswith(TOOL_SEARCH) for tool in given]
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given) if not searches[i]]
    choice: _ToolChoice = fields.get("tool_choice", _ToolChoice(type="auto"))
    messages, prefill = read_messages(fields.get("system", ""), fields["messages"])
    return ModelRequest(
        messages=messages,
        prefill=prefill,
        schema=AnswerSchema(form.schema, "output_config.format") if form is not None else None,
        tools=tools,
        tool_choice=_tool_choice(choice, tools),
        tool=choice.name if choice.type == "tool" else None,
        strict=frozenset(tool["name"] for tool in given if tool.get("strict")),
        one_call=bool(choice.disable_parallel_tool_use),
        variables=fields.get("chat_template_kwargs", {}),
        thinking=THINKING.get(fields["thinking"].type) if "thinking" in fields else None,
        effort=fields.get("output_config", _OutputConfig()).effort,
        stop=tuple(fields.get("stop_sequences", ())),
        max_tokens=fields.get("max_tokens"),
        stream=fields.get("stream", False),
        requested={name: raw[name] for name in RECORDED if name in raw},
        dropped=(NO_SEARCH,) if any(searches) else (),
    )


def _tool(raw: Json, where: str) -> Json:
    """A tool in the chat API's shape."""
    if raw.get("type") not in (None, "custom"):
        raise ApiError(
            f"{where} is of type {raw['type']!r}: tools that the API's maker defines or runs are not served. Fix: "
            "describe the tool yourself, with name, description and input_schema, and run it yourself",
            param=where,
            code="unsupported_value",
        )
    try:
        given = {name: value for name, value in raw.items() if value is not None}
        fields = read_fields(given, TOOL_FIELDS, TOOL_HARMLESS)
    except ApiError as refused:
        raise ApiError(f"{where}: {refused.message}", param=f"{where}.{refused.param}", code=refused.code) from None
    for name in ("name", "input_schema"):
        if name not in fields:
            raise ApiError(f"{where}.{name} is required", param=f"{where}.{name}", code="missing_required_parameter")
    check_schema(fields["input_schema"], f"{where}.input_schema")
    function: Json = {"name": fields["name"], "parameters": fields["input_schema"]}
    if "description" in fields:
        function["description"] = fields["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: _ToolChoice, tools: Sequence[Json]) -> Literal["auto", "none", "required"]:
    named = [tool["function"]["name"] for tool in tools]
    if choice.type in ("auto", "none"):
        return choice.type
    if not named or (choice.type == "tool" and choice.name not in named):
        raise ApiError(
            f"tool_choice cannot be followed: the tools are {', '.join(named) or 'none'}. Fix: give "
            '{"type": "auto"}, or {"type": "tool", "name": ...} with the name of one',
            param="tool_choice",
            code="invalid_value",
        )
    return "required"


# -- messages ----------------------------------------------------------------------------------------------------------


class _Text(Struct, tag="text"):
    text: str


class _ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Json


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Json] | None = None
    is_error: bool | None = None


class _Thought(Struct, tag="thinking"):
    thinking: str
    signature: str | None = None


class _Redacted(Struct, tag="redacted_thinking"):
    pass


_Block = _Text | _ToolUse | _ToolResult | _Thought | _Redacted
_B = TypeVar("_B", bound=_Block)

_TEXT: Mapping[str, type[_Text]] = {"text": _Text}
_BLOCKS: dict[Role, Mapping[str, type[_Block]]] = {
    "system": _TEXT,
    "user": {"text": _Text, "tool_result": _ToolResult},
    "assistant": {"text": _Text, "tool_use": _ToolUse, "thinking": _Thought, "redacted_thinking": _Redacted},
}


def read_messages(system: str | list[Json], raw: Sequence[_Message]) -> tuple[list[Json], str]:
    """Messages in their plain form (see `ModelRequest`), and the beginning of the answer."""
    turns: list[tuple[Role, list[_Block]]] = []
    if system:
        turns.append(("system", [*_blocks(system, _TEXT, "system", "it")]))
    asked: set[str] = set()
    for i, message in enumerate(raw):
        where = f"messages[{i}].content"
        blocks = _blocks(message.content, _BLOCKS[message.role], where, f"a message of role {message.role!r}")
        for j, block in enumerate(blocks):
            if isinstance(block, _ToolUse):
                asked.add(block.id)
            elif isinstance(block, _ToolResult) and block.tool_use_id not in asked:
                raise ApiError(
                    f"{where}[{j}] is the result of tool_use_id {block.tool_use_id!r}, which no assistant message"
                    " before it asked for. Fix: send that message too",
                    param=f"{where}[{j}].tool_use_id",
                )
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, [*blocks]))
    prefill = _prefill(turns.pop()[1]) if turns[-1][0] == "assistant" else ""
    if all(role == "system" for role, _ in turns):
        raise ApiError("messages has nothing to answer. Fix: begin with a message of role 'user'", param="messages")
    return [plain for role, blocks in turns for plain in _plain(role, blocks)], prefill


def _blocks(content: str | list[Json], kinds: Mapping[str, type[_B]], where: str, whose: str) -> Sequence[_B | _Text]:
    if isinstance(content, str):
        return [_Text(content)]
    blocks: list[_B] = []
    for i, raw in enumerate(content):
        kind = kinds.get(str(raw.get("type")))
        if kind is None:
            raise ApiError(
                f"{where}[{i}] is of type {raw.get('type')!r}, which this model cannot be given. Fix: use what {whose} "
                f"may hold: {', '.join(kinds)}",
                param=f"{where}[{i}]",
                code=part_code(raw.get("type")),
            )
        try:
            blocks.append(msgspec.convert(raw, kind))
        except msgspec.ValidationError as error:
            raise ApiError(f"{where}[{i}]: {error}", param=f"{where}[{i}]", code="invalid_value") from None
    return blocks


def _prefill(blocks: Sequence[_Block]) -> str:
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    prefill = "".join(texts)
    if len(texts) < len(blocks) or prefill != prefill.rstrip():
        raise ApiError(
            "messages ends with one of the assistant's, which begins the answer, and is not only text or ends in "
            "white space. Fix: send only text there, without white space at its end",
            param="messages",
            code="invalid_value",
        )
    return prefill


def _plain(role: Role, blocks: Sequence[_Block]) -> list[Json]:
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    if role == "assistant":
        return [_assistant("".join(texts), blocks)]
    plain: list[Json] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in blocks
        if isinstance(block, _ToolResult)
    ]
    text = "\n".join(texts)
    return [*plain, {"role": role, "content": text}] if text or not plain else plain


def _assistant(text: str, blocks: Sequence[_Block]) -> Json:
    plain: Json = {"role": "assistant", "content": text}
    if thoughts := [block for block in blocks if isinstance(block, _Thought)]:
        plain["reasoning_content"] = "".join(block.thinking for block in thoughts)
        if (turn := next(filter(None, (turn_named(block.signature) for block in thoughts)), None)) is not None:
            plain["turn"] = turn
    if calls := [block for block in blocks if isinstance(block, _ToolUse)]:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return plain


def _result(block: _ToolResult) -> str:
    where = f"the content of tool_result {block.tool_use_id!r}"
    text = "\n".join(part.text for part in _blocks(block.content or "", _TEXT, where, "it"))
    if not block.is_error or text.lower().startswith("error"):
        return text
    return f"Error: {text}" if text else "Error"


# -- a provider's answer -----------------------------------------------------------------------------------------------


def _read_answer(data: Json, answer: ProxiedAnswer) -> None:
    choice, kind = answer.choice(), data.get("type")
    if kind == "message_start":
        return _read_answer(data["message"], answer)
    used: Json = data.get("usage") or {}
    answer.usage |= {name: value for name, value in used.items() if value is not None}
    for place, block in enumerate(data.get("content") or ()) if kind == "message" else ():
        _read_block(choice, place, block)
    if kind == "content_block_start":
        _read_block(choice, data["index"], data["content_block"])
    elif kind == "content_block_delta":
        _read_block(choice, data["index"], data["delta"])
    delta: Json = data.get("delta") or {}
    if reason := data.get("stop_reason") or delta.get("stop_reason"):
        choice.finish = read_finish(reason)
    answer.ended |= kind == "message_stop"


def _read_block(choice: ProxiedChoice, place: int, block: Json) -> None:
    choice.text += block.get("text") or ""
    choice.reasoning += block.get("thinking") or ""
    if block.get("type") == "tool_use":
        given = block.get("input")
        arguments = json.dumps(given, ensure_ascii=False) if given else ""
        choice.add_call(place, block["id"], block["name"], arguments)
    elif block.get("type") == "input_json_delta":
        choice.add_call(place, arguments=block.get("partial_json"))
