"""What an outside model was asked and what it said, read from the bytes that pass through, for the record only.

    reader = AnswerReader(dialect)
    reader.feed(b'data: {"choices": [{"delta": {"content": "He"}}]}\\n\\n')     a stream, as it comes
    reader.read(b'{"choices": [{"message": {"content": "Hello"}}]}')           or a whole body
    reader.message(0)                                                         a choice as a plain message

Nothing here changes what passes. What cannot be read (a field of a provider's own, a cut-off stream) is left out of the
record.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from strop.gateway.dialects.base import ApiError, Dialect, Json
from strop.gateway.dialects.proxied import ProxiedAnswer, join_parts

MAX_EVENT = 8 << 20
"""Bytes of one event that are waited for."""
TEXTS = ("messages", "input", "prompt", "system", "instructions")
"""Fields of requests that `read_request` turns into messages."""


class AnswerReader:
    """Reads one answer of an API into `answer`. `unread` says that something could not be read."""

    def __init__(self, dialect: Dialect) -> None:
        self.answer = ProxiedAnswer()
        self.unread = False
        self._dialect = dialect
        self._rest = b""

    def read(self, body: bytes) -> None:
        """A body that came whole."""
        self._read(body)
        self.answer.ended = True

    def feed(self, piece: bytes) -> None:
        """Some bytes of a stream of server-sent events."""
        *lines, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.answer.ended = True
                else:
                    self._read(data)
        if len(self._rest) > MAX_EVENT:
            self._rest, self.unread = b"", True

    def _read(self, data: bytes) -> None:
        try:
            self._dialect.read_answer(json.loads(data), self.answer)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self.unread = True

    @property
    def usage(self) -> Json:
        """What the provider says it used, if that can be written down."""
        try:
            return msgspec.json.decode(msgspec.json.encode(self.answer.usage), type=Json)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return {}

    def message(self, choice: int) -> Json:
        """What was said, as a plain message."""
        said = self.answer.choice(choice)
        message: Json = {"role": "assistant", "content": _join_halves(said.text)}
        if said.reasoning:
            message["reasoning_content"] = _join_halves(said.reasoning)
        if said.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": _arguments(text)}}
                for id, name, text in (map(_join_halves, call) for _, call in sorted(said.calls.items()))
            ]
        return message


def read_request(dialect: Dialect, body: bytes) -> tuple[list[list[Json]], Json]:
    """The conversations of a request in plain messages, each raw prompt one of its own, and what else it asks for. What
    our own models would refuse (images, say) is shown by its name."""
    try:
        raw = msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return [[]], {}
    rest = {name: value for name, value in raw.items() if name not in TEXTS}
    try:
        request = dialect.read(body)
        return [request.messages] if request.messages else [
            [{"role": "prompt", "content": prompt}] for prompt in request.prompts
        ] or [[]], rest
    except (ApiError, RecursionError):
        pass
    messages: list[Json] = []
    for name, role in (("system", "system"), ("instructions", "system"), ("prompt", "prompt"), ("input", "user")):
        if name in raw and not (name == "input" and isinstance(raw[name], list)):
            messages.append({"role": role, "content": join_parts(raw[name])})
    said: Any = raw.get("messages") or raw.get("input")
    for item in cast("list[Any]", said) if isinstance(said, list) else ():
        message = cast(Json, item) if isinstance(item, dict) else {"content": item}
        role = message.get("role")
        messages.append(
            {"role": role if isinstance(role, str) else "user", "content": join_parts(message.get("content"))}
        )
    return [messages], rest


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def _join_halves(text: str) -> str:
    """Halves of a character that came in two pieces are put together; one that stays alone is replaced.

    >>> _join_halves("\\ud83d" + "\\ude42" + "\\ud83d")
    '🙂�'
    """
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
