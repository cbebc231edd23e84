"""What stands between the tags of a call (`Tagged`): JSON with or without a head, parameters in tags, Gemma's notation.

Where values are plain text, the tool's schema says what they are.
"""

from __future__ import annotations

import re
from typing import Any, Literal, cast

from msgspec import Struct

from strop.gateway.tool_calls.base import ParsedCall, Tools
from strop.gateway.tool_calls.syntax import Body, keyed
from strop.gateway.tool_calls.values import (
    Schema,
    Unreadable,
    decode,
    find_properties,
    in_string,
    list_kinds,
    parse_typed,
)

_call = keyed("name", "arguments")


def parse_json_call(body: str, tools: Tools) -> ParsedCall | Literal["open"] | None:
    """
    >>> parse_json_call('{"name": "now", "arguments": {}}', [])
    ParsedCall(name='now', arguments={})
    """
    try:
        return _call(decode(body))
    except Unreadable:
        return "open" if in_string(body) else None


def headed(pattern: str) -> Body:
    """A pattern with groups `name`, `json` (the arguments) and, where calls have one, `id`.

    >>> headed("(?P<name>.+?):(?P<json>.*)")('now:{"a": 1}', [])
    ParsedCall(name='now', arguments={'a': 1})
    """
    compiled = re.compile(pattern, re.DOTALL)

    def read(body: str, tools: Tools) -> ParsedCall | Literal["open"] | None:
        found = compiled.fullmatch(body.strip())
        try:
            arguments = decode(found["json"]) if found else None
        except Unreadable:
            arguments = None
        if found and isinstance(arguments, dict):
            return ParsedCall(found["name"], cast(dict[str, Any], arguments), found.groupdict().get("id") or None)
        brace = body.find("{")
        return "open" if brace >= 0 and in_string(body[brace:]) else None

    return read


class Parameters(Struct, frozen=True):
    """A tool's name, then parameters one by one: patterns with groups `name`, and `key` and `value`.

    A group `kind` may say whether a value is text ("string", "true"), else it is JSON; a group `raw` is text as it is.
    `edge` is one piece of white space at either end of a value that belongs to the format.
    """

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    edge: str = ""

    def __call__(self, body: str, tools: Tools) -> ParsedCall | None:
        head = self.head.match(body)
        if head is None:
            return None
        schemas = find_properties(tools, head["name"])
        arguments: dict[str, Any] = {}
        at = head.end()
        while found := self.parameter.match(body, at):
            arguments[found["key"]] = self._value(found.groupdict(), schemas.get(found["key"]))
            at = found.end()
        return None if body[at:].strip() else ParsedCall(head["name"], arguments)

    def _value(self, found: dict[str, str | None], schema: Any) -> Any:
        if (raw := found.get("raw")) is not None:
            return raw
        text = (found["value"] or "").removeprefix(self.edge).removesuffix(self.edge)
        kind = found.get("kind")
        if kind in ("string", "true"):
            return text
        return parse_typed(text, schema if kind is None else None)


def parameters(head: str, parameter: str, edge: str = "") -> Parameters:
    return Parameters(re.compile(head, re.DOTALL), re.compile(r"\s*" + parameter, re.DOTALL), edge)


class Nested(Struct, frozen=True):
    """A tool's name, then values in tags named after their keys, each tag after `space`: tables have tags for their
    keys, lists have `<item>`. What is not text there is told by the schema."""

    head: re.Pattern[str]
    space: str

    def __call__(self, body: str, tools: Tools) -> ParsedCall | None:
        head = self.head.match(body)
        if head is None:
            return None
        schema = {"type": "object", "properties": find_properties(tools, head["name"])}
        try:
            arguments, end = self._value(body, head.end(), schema)
        except (Unreadable, RecursionError):
            return None
        if end < len(body) or not isinstance(arguments, dict):
            return None
        return ParsedCall(head["name"], cast(dict[str, Any], arguments))

    def _value(self, text: str, at: int, schema: Any) -> tuple[Any, int]:
        """The value that begins at `at` and ends before the tag that closes it, or with the text."""
        known = cast(Schema, schema) if isinstance(schema, dict) else {}
        pairs: list[tuple[str, Any]] = []
        listed = "array" in list_kinds(known)
        while tag := re.compile(re.escape(self.space) + r"<([^/<>][^<>]*)>").match(text, at):
            inner = known.get("items") if listed else cast(Schema, known.get("properties") or {}).get(tag[1])
            value, at = self._value(text, tag.end(), inner)
            close = f"{self.space}</{tag[1]}>"
            if not text.startswith(close, at):
                raise Unreadable
            at += len(close)
            pairs.append((tag[1], value))
        if pairs:
            if listed or ("object" not in list_kinds(known) and all(key == "item" for key, _ in pairs)):
                return [value for _, value in pairs], at
            return dict(pairs), at
        end = text.find(self.space, at)
        end = len(text) if end < 0 else end
        if end == at and list_kinds(known) & {"object", "array"}:
            return ({} if "object" in list_kinds(known) else []), end
        return parse_typed(text[at:end], schema), end


class Gemma(Struct, frozen=True):
    """`call:now{zone:"UTC",days:3}`, where `quote` is the mark that stands for the quotes. Keys may be quoted.

    If `texts`, numbers and the like may stand between quotes too, and the schema says what they are.
    """

    quote: str
    texts: bool = False

    def __call__(self, body: str, tools: Tools) -> ParsedCall | None:
        found = re.fullmatch(r"\s*call:([\w.\-]+)(\{.*\})\s*", body, re.DOTALL)
        if found is None:
            return None
        try:
            value, end = self._table(found[2], 0, find_properties(tools, found[1]) if self.texts else {})
        except (Unreadable, RecursionError):
            return None
        return ParsedCall(found[1], value) if end == len(found[2]) else None

    def _value(self, text: str, at: int, schema: Any) -> tuple[Any, int]:
        if text.startswith(self.quote, at):
            written, end = self._quoted(text, at)
            return (parse_typed(written, schema) if self.texts and schema else written), end
        if text.startswith("{", at):
            return self._table(text, at, {})
        if text.startswith("[", at):
            return self._list(text, at)
        plain = _PLAIN.match(text, at)
        if plain is None:
            raise Unreadable
        return None if plain[0] == "None" else decode(plain[0]), plain.end()

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self.quote)
        end = text.find(self.quote, start)
        if end < 0:
            raise Unreadable
        return text[start:end], end + len(self.quote)

    def _table(self, text: str, at: int, schemas: Schema) -> tuple[dict[str, Any], int]:
        table: dict[str, Any] = {}
        at += 1
        if text.startswith("}", at):
            return table, at + 1
        while True:
            if text.startswith(self.quote, at):
                key, at = self._quoted(text, at)
            else:
                end = text.find(":", at)
                key, at = text[at : max(at, end)], end
            if at < 0 or not text.startswith(":", at):
                raise Unreadable
            table[key], at = self._value(text, at + 1, schemas.get(key))
            if text.startswith("}", at):
                return table, at + 1
            at = _comma(text, at)

    def _list(self, text: str, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at += 1
        if text.startswith("]", at):
            return items, at + 1
        while True:
            item, at = self._value(text, at, None)
            items.append(item)
            if text.startswith("]", at):
                return items, at + 1
            at = _comma(text, at)


_PLAIN = re.compile(r"[^,\[\]{}<]+")


def _comma(text: str, at: int) -> int:
    if not text.startswith(",", at):
        raise Unreadable
    return at + 1
