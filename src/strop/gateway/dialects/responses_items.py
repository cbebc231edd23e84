"""Items of OpenAI's responses as messages in their plain form (see `ModelRequest`).

An answer comes in several items (reasoning, message, function calls), but was sampled as one: items that come back are
put together again. Theirs are the ids of `responses_stream`, which name the turn that is gone on from; items without
such an id belong together as long as they come in that order. An item may be named instead of sent: `recall` puts in
what the turn of its id has said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from strop.gateway.dialects.base import ApiError, Json
from strop.gateway.dialects.fields import part_code, read_arguments
from strop.gateway.dialects.responses_stream import INPUT, turn_of


class _Part(Struct):
    type: str
    text: str | None = None


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    id: str | None = None


class _Reasoning(Struct):
    id: str | None = None
    content: list[_Part] | None = None


class _Call(Struct):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None


class _CustomCall(Struct):
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None


class _Result(Struct):
    call_id: str
    output: str | list[_Part]


class _MoreTools(Struct):
    tools: list[Json]


class _Reference(Struct):
    id: str


_REFERRED = re.compile(r"(msg|rs|(?:f|ct)c(\d{1,9}))_")
"""What an item's id begins with; of a call it has the place among the calls of its turn."""
_Item = _Message | _Reasoning | _Call | _Result | _MoreTools | _Reference
ITEMS: dict[str, type[_Item | _CustomCall]] = {
    "message": _Message,
    "reasoning": _Reasoning,
    "function_call": _Call,
    "function_call_output": _Result,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _Result,
    "additional_tools": _MoreTools,
    "item_reference": _Reference,
}


def read_input(input: str | Sequence[Json]) -> list[Json]:
    """Messages in their plain form (see `ModelRequest`).

    >>> read_input([{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": []},
    ...     {"role": "assistant", "content": "Hello"}])
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    messages: list[Json] = []
    said: _Said | None = None
    for i, raw in enumerate(input):
        where = f"input[{i}]"
        item = _item(raw, where)
        if isinstance(item, _Result):
            content = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            if said:
                said.answered = True
        elif isinstance(item, _MoreTools):
            continue  # they are offered from the start, as all are
        elif isinstance(item, _Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content, f"{where}.content")})
            said = None
        else:
            if said is None or not said.goes_on(item):
                said = _Said()
                messages.append(said.message)
            if isinstance(item, _Reference):
                said.refer(item)
            else:
                said.add(item, where)
    return messages


def list_referred(messages: Sequence[Json]) -> tuple[str, ...]:
    """The turns whose items are named and not sent."""
    return tuple(message["turn"] for message in messages if "referred" in message)


def recall(messages: Sequence[Json], answers: Mapping[str, Json]) -> list[Json]:
    """Messages with the items that are named in them, of `answers` by turn.

    >>> recall([{"role": "assistant", "content": "", "turn": "g1.0/1/4", "referred": ["msg_g1.0/1/4"]}],
    ...     {"g1.0/1/4": {"role": "assistant", "content": "Hello"}})
    [{'role': 'assistant', 'content': 'Hello', 'turn': 'g1.0/1/4'}]
    """
    return [_recall(message, answers) if "referred" in message else message for message in messages]


def _recall(message: Json, answers: Mapping[str, Json]) -> Json:
    whole = {name: value for name, value in message.items() if name != "referred"}
    answer = answers[message["turn"]]
    for id in message["referred"]:
        kind, place = _read_id(id)
        if kind == "msg":
            whole["content"] += answer.get("content") or ""
        elif kind == "rs":
            whole["reasoning_content"] = answer.get("reasoning_content", "")
        elif place < len(calls := answer.get("tool_calls", [])):
            whole["tool_calls"] = [*whole.get("tool_calls", []), calls[place]]
        else:
            raise ApiError(
                f"{id!r} is not an item of its response, which has {len(calls)} calls. Fix: send the item",
                status=404,
                param="input",
                code="item_not_found",
            )
    return whole


def _read_id(id: str) -> tuple[str, int]:
    """What an item is, and a call's place."""
    begins = _REFERRED.match(id)
    assert begins, "an id that `_item` refused"
    return begins[1], int(begins[2] or 0)


_ORDER = [_Reasoning, _Message, _Call]


class _Said:
    """An assistant's message that is put together from the items of one answer."""

    def __init__(self) -> None:
        self.message: Json = {"role": "assistant", "content": ""}
        self.answered = False
        self._turn: str | None = None
        self._last = 0

    def goes_on(self, item: _Message | _Reasoning | _Call | _Reference) -> bool:
        """Whether an item belongs to this answer too. Where ids say so, results of calls may stand in between."""
        turn = turn_of(item.id)
        if turn is not None and self._turn is not None:
            return turn == self._turn
        if isinstance(item, _Reference):
            return False
        now = _ORDER.index(type(item))
        return not self.answered and (now > self._last or (isinstance(item, _Call) and now == self._last))

    def refer(self, item: _Reference) -> None:
        self._turn = self.message["turn"] = turn_of(item.id)
        self.message.setdefault("referred", []).append(item.id)

    def add(self, item: _Message | _Reasoning | _Call, where: str) -> None:
        if self._turn is None and (turn := turn_of(item.id)) is not None:
            self._turn = self.message["turn"] = turn
        self._last = _ORDER.index(type(item))
        if isinstance(item, _Message):
            self.message["content"] += _text(item.content, f"{where}.content")
        elif isinstance(item, _Call):
            self.message.setdefault("tool_calls", []).append(_call(item))
        elif text := "".join(part.text or "" for part in item.content or ()):
            self.message["reasoning_content"] = self.message.get("reasoning_content", "") + text


def _item(raw: Json, where: str) -> _Item:
    kind = raw.get("type", "message")
    if kind == "item_reference" and not _is_ours(raw.get("id")):
        raise ApiError(
            f"{where} refers to {raw.get('id')!r}, which is not an item of an answer from here. Fix: send the item",
            param=where,
            code="unsupported_value",
        )
    if not isinstance(kind, str) or kind not in ITEMS:
        raise ApiError(
            f"{where} is of type {kind!r}, which is not served. Fix: use one of {', '.join(ITEMS)}",
            param=f"{where}.type",
            code="unsupported_value",
        )
    try:
        item = msgspec.convert(raw, ITEMS[kind])
    except msgspec.ValidationError as error:
        raise ApiError(f"{where}: {error}", param=where, code="invalid_value") from None
    if not isinstance(item, _CustomCall):
        return item
    arguments = msgspec.json.encode({INPUT: item.input}).decode()
    return _Call(call_id=item.call_id, name=item.name, arguments=arguments, namespace=item.namespace, id=item.id)


def find_more_tools(input: str | Sequence[Json]) -> list[Json]:
    """The tools that stand among the items of an input, as Codex sends them."""
    items = [] if isinstance(input, str) else [item for item in input if item.get("type") == "additional_tools"]
    return [tool for item in items for tool in msgspec.convert(item, _MoreTools).tools]


def _is_ours(id: object) -> bool:
    return isinstance(id, str) and turn_of(id) is not None and _REFERRED.match(id) is not None


def _text(content: str | Sequence[_Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text"):
            raise ApiError(
                f"{where}[{i}] is of type {part.type!r}, and this model reads text only. Fix: send text",
                param=f"{where}[{i}]",
                code=part_code(part.type),
            )
        if part.text is None:
            place = f"{where}[{i}].text"
            raise ApiError(f"{place} is required", param=place, code="missing_required_parameter")
        texts.append(part.text)
    return "".join(texts)


def _call(item: _Call) -> Json:
    function = {"name": join_name(item.namespace, item.name), "arguments": read_arguments(item.arguments)}
    return {"id": item.call_id, "type": "function", "function": function}


def join_name(namespace: str | None, name: str) -> str:
    """What the model is shown a function as.

    >>> join_name("mcp__files", "read"), join_name("mcp__files__", "read"), join_name(None, "read")
    ('mcp__files__read', 'mcp__files__read', 'read')
    """
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def check_results(messages: Sequence[Json]) -> None:
    """Refuse the result of a call that nobody made."""
    made: set[str] = set()
    for message in messages:
        made.update(call["id"] for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and message.get("tool_call_id") not in made:
            raise ApiError(
                f"a function_call_output answers call_id {message.get('tool_call_id')!r}, which no function_call before"
                " it has. Fix: send the call too, or the previous_response_id of the response that made it",
                param="input",
            )
