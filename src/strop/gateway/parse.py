"""Sampled ids to what an agent sees: text, cut at stop strings, with tool calls taken out.

    ids ──Detokenizer──▶ text ──StopStrings──▶ text ──ToolCalls──▶ text and calls

Each stage is fed as tokens arrive and gives out only what no later token can change. Answers that are not streamed walk
the same way, so streaming cannot change an answer.

Left out: other families' call formats, and reasoning as a field of its own; one class each beside `ToolCalls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(Struct, frozen=True):
    """A tool call as the model wrote it: `Call("calculator", {"expression": "3 * 4"})`."""

    name: str
    arguments: dict[str, Any]


Piece = str | Call


class Detokenizer:
    """Ids to text, never half a character: bytes of an unfinished one wait for the token that completes it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[
            int
        ] = []  # a window: those already given out (context for decoders that need it), then the rest
        self._given = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        return self._take(final=False)

    def close(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._given]) if self._given else ""
        text = self._decode(self._ids)[len(before) :]
        if not text or (text.endswith("\ufffd") and not final):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text


class StopStrings:
    """Gives text out up to the first stop string; what may be the beginning of one waits."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held: str = ""
        self.hit = False

    def feed(self, new: str) -> str:
        if self.hit or not self._stops:
            return "" if self.hit else new
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def close(self) -> str:
        held, self._held = self._held, ""
        return held


class ToolCalls:
    """Takes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` out of text (Hermes, Qwen).

    A call that is not that (`malformed` counts them) stays text, as the model wrote it: the agent sees what happened
    and nothing is guessed. White space around calls belongs to the format and is dropped.

    >>> parser = ToolCalls()
    >>> parser.feed('Let me see.\\n<tool_call>{"name": "now", "argu') + parser.feed('ments": {}}</tool_call>')
    ['Let me see.', Call(name='now', arguments={})]
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._space = ""  # between text and the open call: dropped with a good call, given out with a malformed one
        self._leading = False  # right behind a call with no text so far: white space here leads nowhere
        self._said = False
        self.calls = 0
        self.malformed = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            at = self._held.find(mark)
            if at < 0:
                break
            head, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._inside:
                self._end_call(head, pieces)
            else:
                self._before_call(head, pieces)
            self._inside = not self._inside
        if not self._inside:
            self._outside(pieces)
        return pieces

    def close(self) -> list[Piece]:
        """The answer is over: what was held back is text after all, unless it is white space behind a call."""
        held, self._held = self._held, ""
        if self._inside:
            self.malformed += 1
            return [self._space + OPEN + held]
        return [held] if held and not (self.calls and held.isspace()) else []

    def _before_call(self, head: str, pieces: list[Piece]) -> None:
        head = head.lstrip() if self._leading else head
        text = head.rstrip()
        self._space = head[len(text) :]
        if text:
            self._say(text, pieces)

    def _end_call(self, body: str, pieces: list[Piece]) -> None:
        call = read_call(body)
        if call is None:
            self.malformed += 1
            self._say(self._space + OPEN + body + CLOSE, pieces)
        else:
            self.calls += 1
            self._leading = not self._said
            pieces.append(call)

    def _outside(self, pieces: list[Piece]) -> None:
        if self._leading:
            self._held = self._held.lstrip()
        safe = self._held[: len(self._held) - _overlap(self._held, OPEN)].rstrip()
        if safe:
            self._held = self._held[len(safe) :]
            self._say(safe, pieces)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        self._said, self._leading = True, False
        pieces.append(text)


def read_call(body: str) -> Call | None:
    """The call between the marks, or None if it is not a JSON object with a name and an object of arguments."""
    try:
        return msgspec.json.decode(body, type=Call)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
