"""Chat messages in their plain form (see `ModelRequest`), which every part after the dialects works with.

An agent sends its whole conversation with every call. A message that was read before, byte for byte, is not read again:
the same bytes give the same object, by which `Conversation` knows it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import Struct

from strop.gateway.dialects.base import ApiError, Json
from strop.gateway.dialects.fields import part_code, read_arguments

REMEMBERED, LONGEST = 4096, 4096
"""How many messages are remembered, and how many bytes one of them may have."""
LONG_BYTES = 32 << 20
"""How many bytes longer ones may have, all that are remembered together."""


class _Part(Struct):
    type: str
    text: str | None = None


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
    reasoning: Any = None
    function_call: Any = None
    audio: Any = None


class _Wrong(Exception):
    """What is wrong with a message, and where in it."""

    def __init__(self, why: str, where: str = "", code: str | None = None) -> None:
        self.why, self.where, self.code = why, where, code


def read_messages(raw: Sequence[bytes | msgspec.Raw]) -> list[Json]:
    """Messages in their plain form, from JSON. They are shared: nobody may change them."""
    asked: set[str] = set()
    messages: list[Json] = []
    for text in map(bytes, raw):
        try:
            message = _remembered(text) if len(text) <= LONGEST else _long.read(text)
        except _Wrong as wrong:
            place = f"messages[{len(messages)}]{wrong.where}"
            raise ApiError(f"{place}{wrong.why}", param=place, code=wrong.code) from None
        if calls := message.get("tool_calls"):
            for call in calls:
                asked.add(call["id"])
        elif message["role"] == "tool" and message["tool_call_id"] not in asked:
            where = f"messages[{len(messages)}]"
            raise ApiError(
                f"{where} answers tool_call_id {message['tool_call_id']!r}, which no assistant message before it "
                "asked for. Fix: send that message too",
                param=f"{where}.tool_call_id",
            )
        messages.append(message)
    return messages


_decode = msgspec.json.Decoder(_Message).decode


def _read(raw: bytes) -> Json:
    try:
        message = _decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _Wrong(f": {error}", code="invalid_value") from None
    role = "system" if message.role == "developer" else message.role
    plain: Json = {"role": role, "content": _text(message)}
    if message.name is not None:
        plain["name"] = message.name
    if role == "assistant":
        plain |= _assistant(message)
    elif role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


class LongMessages:
    """The long messages that were read last, by their bytes; `limit` is for all of them together."""

    def __init__(self, limit: int = LONG_BYTES) -> None:
        self.num_bytes = 0
        self._limit = limit
        self._read: OrderedDict[bytes, Json] = OrderedDict()

    def read(self, raw: bytes) -> Json:
        if (found := self._read.get(raw)) is not None:
            self._read.move_to_end(raw)
            return found
        message = self._read[raw] = _read(raw)
        self.num_bytes += len(raw)
        while self.num_bytes > self._limit:
            self.num_bytes -= len(self._read.popitem(last=False)[0])
        return message


_remembered = lru_cache(REMEMBERED)(_read)
_long = LongMessages()


def _assistant(message: _Message) -> Json:
    if message.function_call is not None or message.audio is not None:
        raise _Wrong(" has a function_call or audio, which are not served. Fix: send text and tool_calls")
    plain: Json = {}
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if isinstance(thought, str):  # under its other name a framework may keep something else
        plain["reasoning_content"] = thought
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _call(call: _Call) -> Json:
    arguments = read_arguments(call.function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text(message: _Message) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            why = f" is of type {part.type!r}, and this model reads text only. Fix: send text"
            raise _Wrong(why, f".content[{i}]", code=part_code(part.type))
        if part.text is None:
            raise _Wrong(" is required", f".content[{i}].text", code="missing_required_parameter")
        texts.append(part.text)
    return "".join(texts)
