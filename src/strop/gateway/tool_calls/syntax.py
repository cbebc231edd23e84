"""Ways to write calls: between tags, as JSON, as Python.

Tagged    <tool_call>...</tool_call>            what stands between the tags is read by bodies.py
Json      [TOOL_CALLS][{"name": ..., ...}]      a list, or objects one after the other; the value shows its own end
Python    [get_weather(city="Paris"), now()]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, Literal, cast

from msgspec import Struct

from strop.gateway.tool_calls.base import ParsedCall, Tools
from strop.gateway.tool_calls.reader import CallFound, MalformedCall, SectionEnd, Step
from strop.gateway.tool_calls.values import Scan, Unreadable, decode, end_of_json, end_of_python, evaluate, parse_python

Body = Callable[[str, Tools], ParsedCall | Literal["open"] | None]
"""What stands between two tags: a call, none, or "open" if the closing tag is part of a value."""

_LONGEST_HEADER = 256


class TaggedCalls(Struct, frozen=True):
    """Calls between `open` and `close`. Several may stand between `begin` and `end`, if the family has those marks: an
    answer may still leave them out."""

    open: str
    close: str
    body: Body
    begin: str = ""
    end: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.begin, self.open) if self.begin else (self.open,)

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.opens, self.close, *((self.end,) if self.end else ()))

    def step(self, text: str, *, section: str, scan: Scan, final: bool, tools: Tools) -> Step:
        at = 0
        if section or (self.begin and text.startswith(self.begin)):
            at = _skip(text, 0 if section else len(self.begin))
            if section and self.end and text.startswith(self.end, at):
                return SectionEnd(at + len(self.end))
            if not text.startswith(self.open, at):
                if not final and _may_become(text, at, self.open, *((self.end,) if section else ())):
                    return None
                return SectionEnd(0) if section else MalformedCall(len(self.begin))
        return self._item(text, at + len(self.open), scan, final, tools)

    def _item(self, text: str, start: int, scan: Scan, final: bool, tools: Tools) -> Step:
        at = text.find(self.close, max(start, scan.seen - len(self.close) + 1))
        while at >= 0:
            call = self.body(text[start:at], tools)
            if isinstance(call, ParsedCall):
                return CallFound(at + len(self.close), call, "section" if self.begin else "")
            if call is None:
                return self._bad(text, start)
            at = text.find(self.close, at + len(self.close))
        return self._unclosed(text, start, tools) if final else None

    def _unclosed(self, text: str, start: int, tools: Tools) -> Step:
        """The end of an answer that lacks the closing tag, or the rest of it: a call is one all the same, as other
        servers have it."""
        begun = next((n for n in range(len(self.close) - 1, 0, -1) if text.endswith(self.close[:n])), 0)
        body = text[start : len(text) - begun].rstrip()
        call = self.body(body, tools)
        if not isinstance(call, ParsedCall):
            return self._bad(text, start)
        whole = body.endswith(("}", "```"))
        return CallFound(len(text), call, "section" if self.begin else "", whole)

    def _bad(self, text: str, start: int) -> Step:
        first = text.find(self.close, start)
        return MalformedCall(len(text) if first < 0 else first + len(self.close))


Item = Callable[[Any], ParsedCall | None]


def keyed(name: str, *arguments: str, id: str = "") -> Item:
    """Calls as objects with these keys: the tool's name, and one of those for its arguments. `id` is a pattern of the
    ids they may have, if this family's do.

    >>> keyed("name", "parameters", "arguments")({"name": "f", "parameters": {}})
    ParsedCall(name='f', arguments={})
    """

    def read(value: Any) -> ParsedCall | None:
        if not isinstance(value, dict):
            return None
        table = cast(dict[str, Any], value)
        given = next((table[key] for key in arguments if key in table), None)
        if not isinstance(table.get(name), str) or not isinstance(given, dict):
            return None
        named = table.get("id")
        ours = isinstance(named, str) and re.fullmatch(id, named) if id else None
        return ParsedCall(table[name], cast(dict[str, Any], given), cast(str, named) if ours else None)

    return read


def single(value: Any) -> ParsedCall | None:
    """Calls as objects with one key, the tool's name.

    >>> single({"f": {"a": 1}})
    ParsedCall(name='f', arguments={'a': 1})
    """
    if isinstance(value, dict) and len(cast(dict[str, Any], value)) == 1:
        ((name, arguments),) = cast(dict[str, Any], value).items()
        if isinstance(arguments, dict):
            return ParsedCall(name, cast(dict[str, Any], arguments))
    return None


class JsonCalls(Struct, frozen=True):
    """JSON after a mark, in a list or not; `closes` may follow.

    `bare` has the brackets that may also begin a call without a mark. Such JSON is a call if it reads as one; otherwise
    it is an answer in JSON and no malformed call. A `header` matches what stands between the mark and an object of
    arguments, with the tool's name as its first group and maybe a group `id`; `item` is None if there are no other
    calls than those.
    """

    after: tuple[str, ...]
    item: Item | None = keyed("name", "arguments")
    closes: tuple[str, ...] = ()
    bare: str = ""
    header: re.Pattern[str] | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        return (*self.after, *self.bare)

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.after, *self.closes)

    @property
    def bare_call(self) -> str:
        """A pattern of how a call begins without a mark; empty if none does."""
        keys = "|".join(_FIRST_KEYS)
        return (r"" if "{" in self.bare else r"\[\s*") + rf"\{{\s*({keys})" if self.bare else ""

    def step(self, text: str, *, section: str, scan: Scan, final: bool, tools: Tools) -> Step:
        if section:
            return self._next(text, section, scan, final)
        mark = max((mark for mark in self.after if text.startswith(mark)), key=len, default="")
        at = _skip(text, len(mark) - mark.endswith("["))
        if at == len(text):
            return MalformedCall(at) if final else None
        if self.header and (self.item is None or text[at] not in "[{"):
            return self._headed(text, at, scan, final)
        if text[at] == "[":
            inner = _skip(text, at + 1)
            if inner == len(text):
                return MalformedCall(inner, bool(mark)) if final else None
            if text[inner] == "{":
                return self._item(text, inner, "list", bool(mark), scan, final)
        elif text[at] == "{":
            return self._item(text, at, "objects", bool(mark), scan, final)
        return MalformedCall(max(at, 1), bool(mark))

    def _next(self, text: str, section: str, scan: Scan, final: bool) -> Step:
        """After a call: another, or the end."""
        at = _skip(text, 0)
        if at == len(text):
            return SectionEnd(at) if final else None
        if section == "list" and text[at] == "]":
            return _closed(text, at + 1, self.closes, final)
        if text[at] in (",", ";") and (section == "list" or self.bare):
            inner = _skip(text, at + 1)
            if inner == len(text):
                return SectionEnd(0) if final else None
            if text[inner] == "{":
                return self._item(text, inner, section, section == "list", scan, final)
        elif section == "objects":
            if text[at] == "{" and self.bare:
                return self._item(text, at, section, False, scan, final)
            return _closed(text, 0, self.closes, final)
        return SectionEnd(0)

    def _headed(self, text: str, at: int, scan: Scan, final: bool) -> Step:
        assert self.header is not None
        brace = text.find("{", at, at + _LONGEST_HEADER)
        if brace < 0:
            return MalformedCall(at) if final or len(text) - at >= _LONGEST_HEADER else None
        header = self.header.fullmatch(text, at, brace)
        if header is None:
            return MalformedCall(at)
        end = end_of_json(text, brace, scan)
        if end is None:
            return MalformedCall(len(text)) if final else None
        try:
            arguments = decode(text[brace:end])
        except Unreadable:
            return MalformedCall(end)
        return CallFound(end, ParsedCall(header[1], arguments, header.groupdict().get("id")), "objects")

    def _item(self, text: str, at: int, section: str, marked: bool, scan: Scan, final: bool) -> Step:
        if not marked:
            likely = _begins_call(text, at)
            if likely is False or (likely is None and final):
                return MalformedCall(at + 1, malformed=False)
            if likely is None:
                return None
        end = end_of_json(text, at, scan)
        if end is None:
            return MalformedCall(len(text)) if final else None
        assert self.item is not None
        try:
            call = self.item(decode(text[at:end]))
        except Unreadable:
            return MalformedCall(end)
        return MalformedCall(end, marked) if call is None else CallFound(end, call, section)


class PythonCalls(Struct, frozen=True):
    """A list of Python calls with keyword arguments, after a mark or bare; `closes` may follow."""

    after: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()

    bare_call = r"\[\s*[A-Za-z_][\w.\-]*\("

    @property
    def opens(self) -> tuple[str, ...]:
        return (*self.after, "[")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.after, *self.closes)

    def step(self, text: str, *, section: str, scan: Scan, final: bool, tools: Tools) -> Step:
        mark = "" if section else next((mark for mark in self.after if text.startswith(mark)), "")
        at = _skip(text, len(mark))
        if at == len(text):
            return (SectionEnd(at) if section else MalformedCall(at)) if final else None
        if section and text[at] == "]":
            return _closed(text, at + 1, self.closes, final)
        if text[at] != ("," if section else "["):
            return SectionEnd(0) if section else MalformedCall(len(mark) or 1, bool(mark))
        at = _skip(text, at + 1)
        name = _PYTHON_NAME.match(text, at)
        if name is None or not name[2]:
            if not final and (name.end() if name else at) == len(text):
                return None
            return SectionEnd(0) if section else MalformedCall(at, bool(mark))
        end = end_of_python(text, name.end() - 1, scan)
        if end is None:
            return MalformedCall(len(text)) if final else None
        call = _python_call(name[1], text[name.end() - 1 : end])
        return MalformedCall(end) if call is None else CallFound(end, call, "list")


_PYTHON_NAME = re.compile(r"([A-Za-z_][\w.\-]*)(\(?)")


def _python_call(name: str, arguments: str) -> ParsedCall | None:
    try:
        match parse_python("f" + arguments):
            case ast.Call(args=[], keywords=keywords):
                given = {keyword.arg: evaluate(keyword.value) for keyword in keywords if keyword.arg}
                return ParsedCall(name, given) if len(given) == len(keywords) else None
            case _:
                return None
    except (Unreadable, RecursionError):
        return None


def _closed(text: str, end: int, closes: tuple[str, ...], final: bool) -> Step:
    """Calls are over at `end`, or after the mark that closes them."""
    at = _skip(text, end)
    for close in closes:
        if text.startswith(close, at):
            return SectionEnd(at + len(close))
    return None if not final and _may_become(text, at, *closes) else SectionEnd(end)


def _skip(text: str, at: int) -> int:
    """Past white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _may_become(text: str, at: int, *marks: str) -> bool:
    """Whether what begins at `at` is the beginning of one of these."""
    return any(mark.startswith(text[at:]) for mark in marks)


def _begins_call(text: str, at: int) -> bool | None:
    """Whether an object begins as one of a call does, with its name; None if there is not enough of it."""
    key = text[_skip(text, at + 1) :][:12]
    if any(key.startswith(known) for known in _FIRST_KEYS):
        return True
    return None if any(known.startswith(key) for known in _FIRST_KEYS) else False


_FIRST_KEYS = ('"name"', '"type"', '"id"', '"arguments"', '"parameters"')
