"""Argument values from text: JSON, Python literals, and plain text whose type only the tool's schema tells."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, cast

import msgspec
from msgspec import Struct

from strop.gateway.tool_calls.base import Tools

Schema = dict[str, Any]

_JSON_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_PYTHON_TOKEN = re.compile(
    r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'|["'{}\[\]()]""",
    re.DOTALL,
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f]")


MOST_PARTS = 1000
"""Schemas that one may choose from, each way to them counted: references to references double them."""


class Unreadable(Exception):
    """The text is not a value."""


def decode(text: str) -> Any:
    """
    >>> decode('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        if "out of range" in str(error):  # a number that is well-formed: the nearest that there is
            return json.loads(text, parse_float=_parse_float, parse_constant=_refuse)
        raise Unreadable from error


def _parse_float(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _refuse(name: str) -> None:
    raise Unreadable


def parse_literal(text: str) -> Any:
    """A Python literal of what JSON can hold; JSON's own names for true, false and null count too.

    >>> parse_literal("{'a': [True, null, -1.5]}")
    {'a': [True, None, -1.5]}
    """
    return evaluate(parse_python(text))


def parse_python(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python frowns upon are what the model wrote
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable from error


def evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str(value)) if not _SURROGATE.search(value):
            return value
        case ast.Constant(value=bool() | int() | None as value):
            return value
        case ast.Constant(value=float(value)) if abs(value) != float("inf"):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if value != float("inf"):
            return -value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [evaluate(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            table = {evaluate(key): evaluate(value) for key, value in zip(keys, values, strict=True) if key}
            if len(table) == len(keys) and all(isinstance(key, str) for key in table):
                return table
        case _:
            pass
    raise Unreadable


class Scan(Struct):
    """How far a value that is not over yet was looked through, so that no text is looked through again and again:
    `seen` characters were there at the last look, brackets are `depth` deep at `at`, where a string opened by `quote`
    may have begun."""

    seen: int = 0
    at: int = 0
    depth: int = 0
    quote: str = ""


def end_of_json(text: str, at: int, scan: Scan) -> int | None:
    """Where the object or list that begins at `at` ends, or None if it does not yet.

    >>> end_of_json('x{"a": "}"} y', 1, Scan())
    11
    """
    return _end(_JSON_TOKEN, text, at, scan)


def end_of_python(text: str, at: int, scan: Scan) -> int | None:
    return _end(_PYTHON_TOKEN, text, at, scan)


def _end(tokens: re.Pattern[str], text: str, at: int, scan: Scan) -> int | None:
    if scan.quote and text.find(scan.quote, scan.seen) < 0:
        return None
    depth = scan.depth
    for token in tokens.finditer(text, scan.at if depth else at):
        if token[0] in ("{", "[", "("):
            depth += 1
        elif token[0] in ("}", "]", ")"):
            depth -= 1
            if depth == 0:
                return token.end()
        elif token[0] in ('"', "'"):  # a string that is not over
            scan.at, scan.depth, scan.quote = token.start(), depth, token[0]
            return None
    scan.at, scan.depth, scan.quote = len(text), depth, ""
    return None


def in_string(text: str) -> bool:
    """Whether JSON text ends within a string, so that what follows still belongs to it.

    >>> in_string('{"a": "b'), in_string('{"a": "b"'), in_string('{"a: 1}\\n')
    (True, False, False)
    """
    opened = next((token for token in _JSON_TOKEN.finditer(text) if token[0] == '"'), None)
    return opened is not None and not _CONTROL.search(text, opened.end())


def find_properties(tools: Tools, name: str) -> Schema:
    """The schemas of a tool's parameters by name; nothing for a tool that is not there."""
    for tool in tools:
        function = cast(Schema, tool.get("function") or {})
        if function.get("name") == name:
            root = cast(Schema, function.get("parameters") or {})
            found = resolve(root, root).get("properties")
            if not isinstance(found, dict):
                return {}
            return {name: resolve(inner, root) for name, inner in cast(Schema, found).items()}
    return {}


def resolve(schema: Any, root: Schema) -> Schema:
    """A schema without a `$ref` at its top or in what it offers to choose from. What leads nowhere, back to itself, or
    to more than `MOST_PARTS` others stays as it is.

    >>> resolve({"$ref": "#/$defs/it"}, {"$defs": {"it": {"type": "string"}}})
    {'type': 'string'}
    """
    return _resolve(schema, root, frozenset(), itertools.count())


def _resolve(schema: Any, root: Schema, seen: frozenset[str], parts: Iterator[int]) -> Schema:
    found = cast(Schema, schema) if isinstance(schema, dict) else {}
    if next(parts) > MOST_PARTS:
        return found
    while isinstance(path := found.get("$ref"), str) and path.startswith("#") and path not in seen:
        seen |= {path}
        target: Any = root
        for key in path[1:].split("/")[1:]:
            target = cast(Schema, target).get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        found = cast(Schema, target) | {key: value for key, value in found.items() if key != "$ref"}
    if isinstance(options := found.get("anyOf"), list) and any("$ref" in str(one) for one in cast(list[Any], options)):
        return found | {"anyOf": [_resolve(one, root, seen, parts) for one in cast(list[Any], options)]}
    return found


def list_kinds(schema: Any) -> frozenset[str]:
    """The JSON types a schema allows; none if it does not say.

    >>> sorted(list_kinds({"anyOf": [{"type": "integer"}, {"type": ["string", "null"]}]}))
    ['integer', 'null', 'string']
    >>> list_kinds({"anyOf": 5}), list_kinds({"type": [[]]})
    (frozenset(), frozenset())
    """
    if not isinstance(schema, dict):
        return frozenset()
    schema = cast(Schema, schema)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in cast(list[Any], named) if isinstance(kind, str))
    options = schema.get("anyOf") or schema.get("oneOf")
    found = [list_kinds(option) for option in cast(list[Any], options)] if isinstance(options, list) else []
    if not all(found):
        return frozenset()
    if not found and isinstance(schema.get("enum"), list):
        return frozenset(kind for value in cast(list[Any], schema["enum"]) for kind in _kinds_of(value))
    return frozenset[str]().union(*found)


def parse_typed(text: str, schema: Any) -> Any:
    """A value that was written as plain text: strings stay strings, the rest is read as the schema says. What does not
    fit its type stays the text it is; where no type is given, what reads as JSON is JSON.

    >>> [parse_typed("12", {"type": kind}) for kind in ("string", "integer")], parse_typed("True", {"type": "boolean"})
    (['12', 12], True)
    """
    allowed = list_kinds(schema)
    if allowed == frozenset({"string"}):
        return text
    for read in (decode, parse_literal) if allowed else (decode,):
        try:
            value = read(text)
        except Unreadable:
            continue
        fitting = _kinds_of(value) & allowed
        if not allowed or (fitting and not ("string" in allowed and isinstance(value, str))):
            return value
    return text


def _kinds_of(value: Any) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
        case _:
            return frozenset({"null"})
