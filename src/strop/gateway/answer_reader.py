"""What an outside model was asked and what it said, read from the bytes that pass through, for the record only.

    listening = Listening("chat/completions")
    listening.feed(b'data: {"choices": [{"delta": {"content": "He"}}]}\\n\\n')     a stream, as it comes
    listening.whole(b'{"choices": [{"message": {"content": "Hello"}}]}')          or a whole body
    listening.answers                                                            one plain message per choice

Nothing here changes what passes. What cannot be read (a field of a provider's own, a cut-off stream) is left out of the
record; `unread` says that something was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from strop.gateway.dialects.base import Dialect, Json, Refused
from strop.types import Finish

FINISH: dict[str, Finish] = {
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
}
"""How providers say why an answer ended; whatever else they say is a `stop`."""
MAX_EVENT = 8 << 20
"""Bytes of one event that are waited for."""
TEXTS = ("messages", "input", "prompt", "system", "instructions")
"""Fields of requests that `asked` turns into messages."""


class Said(Struct):
    """One choice, as far as it was heard. Calls are by the place their API gives them."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict[int, list[str]])  # [id, name, arguments as text]
    finish: Finish | None = None

    @property
    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": _joined(self.text)}
        if self.reasoning:
            message["reasoning_content"] = _joined(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": _arguments(text)}}
                for id, name, text in (map(_joined, call) for _, call in sorted(self.calls.items()))
            ]
        return message


class Listening:
    """One answer of the API whose address ends in `path`. `ended` is set by a stream's own last event."""

    def __init__(self, path: str) -> None:
        self.choices: dict[int, Said] = {}
        self.usage: Json = {}
        self.ended = self.unread = False
        heard: dict[str, Callable[[Json], None]] = {"messages": self._messages, "responses": self._responses}
        self._hear = heard.get(path, self._choices)
        self._rest = b""

    def whole(self, body: bytes) -> None:
        self._event(body)
        self.ended = True

    def feed(self, piece: bytes) -> None:
        """Some bytes of a stream of server-sent events."""
        *lines, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.ended = True
                else:
                    self._event(data)
        if len(self._rest) > MAX_EVENT:
            self._rest, self.unread = b"", True

    def _event(self, data: bytes) -> None:
        try:
            self._hear(json.loads(data))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self.unread = True

    @property
    def spent(self) -> Json:
        """What the provider says it used, if that can be written down."""
        try:
            return msgspec.json.decode(msgspec.json.encode(self.usage), type=Json)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return {}

    def said(self, choice: int = 0) -> Said:
        return self.choices.setdefault(choice, Said())

    # -- each API ----------------------------------------------------------------------------------------------------

    def _choices(self, data: Json) -> None:
        """Chat completions and completions, whole and in chunks."""
        self.usage = data.get("usage") or self.usage
        for choice in data.get("choices") or ():
            said = self.said(choice.get("index", 0))
            part: Json = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            said.text += _text(part.get("content"))
            said.reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
            for place, call in enumerate(part.get("tool_calls") or ()):
                function = call.get("function") or {}
                _add(said, call.get("index", place), call.get("id"), function.get("name"), function.get("arguments"))
            if choice.get("finish_reason"):
                said.finish = FINISH.get(choice["finish_reason"], "stop")

    def _messages(self, data: Json) -> None:
        """Anthropic's messages."""
        said, kind = self.said(), data.get("type")
        if kind == "message_start":
            return self._messages(data["message"])
        usage: Json = data.get("usage") or {}
        self.usage |= {name: value for name, value in usage.items() if value is not None}
        blocks = enumerate(data.get("content") or ()) if kind == "message" else ()
        for place, block in blocks:
            self._block(said, place, block)
        if kind == "content_block_start":
            self._block(said, data["index"], data["content_block"])
        elif kind == "content_block_delta":
            self._block(said, data["index"], data["delta"])
        delta: Json = data.get("delta") or {}
        reason = data.get("stop_reason") or delta.get("stop_reason")
        if reason:
            said.finish = FINISH.get(reason, "stop")
        self.ended |= kind == "message_stop"

    def _block(self, said: Said, place: int, block: Json) -> None:
        said.text += block.get("text") or ""
        said.reasoning += block.get("thinking") or ""
        if block.get("type") == "tool_use":
            given = block.get("input")
            _add(said, place, block["id"], block["name"], json.dumps(given, ensure_ascii=False) if given else "")
        elif block.get("type") == "input_json_delta":
            _add(said, place, None, None, block.get("partial_json"))

    def _responses(self, data: Json) -> None:
        """OpenAI's responses: the last event of a stream has all of it."""
        kind = data.get("type") or ""
        if kind == "response.output_text.delta":
            self.said().text += data["delta"]
        whole = data.get("response") if kind in ENDS else None if kind else data
        if whole is None:
            return
        self.ended, said = True, Said()
        self.choices, self.usage = {0: said}, whole.get("usage") or {}
        for place, item in enumerate(whole.get("output") or ()):
            if item.get("type") == "function_call":
                _add(said, place, item.get("call_id"), item.get("name"), item.get("arguments"))
            elif item.get("type") == "message":
                said.text += _text(item.get("content"))
            elif item.get("type") == "reasoning":
                said.reasoning += _text(item.get("content") or item.get("summary"))
        details: Json = whole.get("incomplete_details") or {}
        why = details.get("reason") or ("tool_calls" if said.calls else "stop")
        said.finish = "error" if whole.get("status") == "failed" else FINISH.get(why, "stop")


ENDS = ("response.completed", "response.incomplete", "response.failed")


def asked(dialect: Dialect, body: bytes) -> tuple[list[Json], Json]:
    """A request's messages in their plain form, and what else it asks for. What our own models would refuse (images,
    say) is shown by its name."""
    try:
        raw = msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return [], {}
    rest = {name: value for name, value in raw.items() if name not in TEXTS}
    try:
        request = dialect.read(body)
        return request.messages or [{"role": "prompt", "content": prompt} for prompt in request.prompts], rest
    except (Refused, RecursionError):
        pass
    messages: list[Json] = []
    for name, role in (("system", "system"), ("instructions", "system"), ("prompt", "prompt"), ("input", "user")):
        if name in raw and not (name == "input" and isinstance(raw[name], list)):
            messages.append({"role": role, "content": _text(raw[name])})
    said: Any = raw.get("messages") or raw.get("input")
    for item in cast("list[Any]", said) if isinstance(said, list) else ():
        message = cast(Json, item) if isinstance(item, dict) else {"content": item}
        role = message.get("role")
        messages.append({"role": role if isinstance(role, str) else "user", "content": _text(message.get("content"))})
    return messages, rest


def _add(said: Said, place: Any, id: Any, name: Any, arguments: Any) -> None:
    if not isinstance(place, int) or not all(isinstance(part, str | None) for part in (id, name, arguments)):
        raise TypeError("no call of this API")
    call = said.calls.setdefault(place, ["", "", ""])
    call[0], call[1] = call[0] or id or "", call[1] or name or ""
    call[2] += arguments or ""


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def _joined(text: str) -> str:
    """Halves of a character that came in two pieces are put together; one that stays alone is no text.

    >>> _joined("\\ud83d" + "\\ude42" + "\\ud83d")
    '🙂�'
    """
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _text(content: Any) -> str:
    """The text of a content that may be given in parts.

    >>> _text([{"type": "text", "text": "What is this? "}, {"type": "image_url", "image_url": {}}])
    'What is this? [image_url]'
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    parts: list[str] = []
    for part in cast("list[Any]", content):
        shown = cast(Json, part) if isinstance(part, dict) else {"text": str(part)}
        text = shown.get("text")
        parts.append(text if isinstance(text, str) else f"[{shown.get('type', 'part')}]")
    return "".join(parts)
