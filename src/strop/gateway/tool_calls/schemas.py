"""A JSON Schema as a choice of simple ones, for notations that are not JSON, and its strings as plain text.

split({"type": ["string", "null"]})     [{"type": "string"}, {"type": "null"}]
split({"enum": ["a", 1]})               [{"const": "a"}, {"const": 1}]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

from strop.gateway.tool_calls.values import Schema, list_kinds, resolve
from strop.models.grammar import BadSchema
from strop.models.lark import Lark, quote

KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
UNHELD = (
    "allOf", "oneOf", "not", "if", "then", "else", "patternProperties", "dependentRequired", "dependentSchemas",
    "propertyNames", "minProperties", "maxProperties", "contains", "uniqueItems", "unevaluatedProperties",
    "unevaluatedItems", "prefixItems", "dependencies",
)  # fmt: skip
"""Keywords that only the grammars of JSON know."""
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
}
FORMATS["date-time"] = f"{FORMATS['date']}T{FORMATS['time']}"


def check_shape(schema: Any) -> Schema:
    """The schema, if what its keywords say is of the kind that they take. Raises `BadSchema`."""
    if not isinstance(schema, dict):
        raise BadSchema(f"{schema!r} is not a schema")
    schema = cast(Schema, schema)
    for key, (told, fits) in SHAPES.items():
        if key in schema and not fits(schema[key]):
            raise BadSchema(f"its {key} {schema[key]!r} is not {told}")
    return schema


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in cast(list[Any], value))


SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": ("a type, or a list of them", lambda value: isinstance(value, str) or (value != [] and _are_texts(value))),
    "enum": ("a list of values", lambda value: isinstance(value, list) and value != []),
    "anyOf": ("a list of schemas", lambda value: isinstance(value, list) and all(map(_is_schema, cast(Any, value)))),
    "properties": (
        "a table of schemas",
        lambda value: isinstance(value, dict) and all(map(_is_schema, cast(Schema, value).values())),
    ),
    "required": ("a list of names", _are_texts),
    "additionalProperties": ("a schema", _is_schema),
    "items": ("a schema", _is_schema),
    "pattern": ("a text", lambda value: isinstance(value, str)),
    "format": ("a text", lambda value: isinstance(value, str)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), ("a count", _is_size)),
}
"""What keywords take, by their names."""


def split(schema: Any, root: Schema) -> list[Schema]:
    """Schemas of one kind or one value each, any of which a value may follow; {} allows anything. Raises `BadSchema`
    for keywords that are not held to here."""
    if schema is False:
        raise BadSchema("it allows no value where there has to be one")
    return _split({} if schema is True else resolve(check_shape(schema), root), root)


def _split(schema: Schema, root: Schema) -> list[Schema]:
    check_shape(schema)
    if "$ref" in schema:
        raise BadSchema(f"$ref {schema['$ref']!r} leads nowhere, back to itself, or to too many others")
    if unheld := sorted(key for key in UNHELD if key in schema):
        raise BadSchema(f"in this model's form of a call no grammar holds to {', '.join(unheld)}")
    kinds = schema.get("type")
    allowed = [kinds] if isinstance(kinds, str) else cast("list[str] | None", kinds)
    if "const" in schema or "enum" in schema:
        values: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
        found = [{"const": value} for value in values if not allowed or list_kinds({"enum": [value]}) & {*allowed}]
        if not found:
            raise BadSchema(f"none of {values} is of type {' or '.join(allowed or ())}")
        return found
    if options := schema.get("anyOf"):  # each of them is resolved already
        return [
            one for option in options if option is not False for one in _split({} if option is True else option, root)
        ]
    if allowed is None:
        allowed = ["object"] * ("properties" in schema) or ["array"] * ("items" in schema)
    return [schema | {"type": kind} for kind in allowed] or [{}]


def is_free(branch: Schema) -> bool:
    """Whether whatever is of its kind follows it."""
    kind = branch.get("type")
    return not branch or kind in ("null", "boolean") or (kind in ("integer", "number") and not {*LIMITS} & {*branch})


def write_string(rules: Lark, branch: Schema, unsaid: Sequence[str], *, told: bool = True) -> str:
    """A terminal for the text of a string, as it is, in which none of `unsaid` stands. Unless it is `told` from other
    values it is none of those."""
    text = rules.terminal(r"/(?s:.)*/")
    parts = [text, *(f"~({text} {quote(one)} {text})" for one in unsaid)]
    if not told:
        parts += [r"/[A-Za-z_](?s:.)*/", '~("true" | "false" | "null" | "True" | "False" | "None")']
    least, most = branch.get("minLength", 0), branch.get("maxLength")
    if least or most is not None:
        parts.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
    if "pattern" in branch:
        parts.append(_read_pattern(branch["pattern"]))
    if (form := branch.get("format")) is not None:
        if form not in FORMATS:
            raise BadSchema(f"in this model's form of a call no grammar holds to the format {form!r}")
        parts.append(f"/{FORMATS[form]}/")
    return rules.terminal(" & ".join(parts))


_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A letter of a pattern, an escaped one, or a class of letters."""
_SET = re.compile(r"(?<!\\)\[|&&|--|~~")
"""Within a class: what the library takes for sets of classes, and JSON Schema for letters."""


def _read_pattern(pattern: str) -> str:
    """A pattern, which may match anywhere, as one of the whole text.

    >>> _read_pattern("^a/b")
    '/(a\\\\/b)(?s:.*)/'
    """
    parts: list[str] = _PART.findall(pattern)
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = parts[begins : len(parts) - ends]
    depths = [*accumulate((part == "(") - (part == ")") for part in inner)]
    balanced = not depths or (min(depths) >= 0 and depths[-1] == 0)
    choice = any(part == "|" and depth == 0 for part, depth in zip(inner, depths, strict=True))
    sets = any(len(part) > 2 and part[0] == "[" and _SET.search(part, 1) for part in inner)
    if not balanced or sets or {"^", "$"} & {*inner} or ((begins or ends) and choice):
        raise BadSchema(f"in this model's form of a call no grammar holds to the pattern {pattern!r}")
    text = "".join(map(_escape, inner))
    return f"/{'' if begins else '(?s:.*)'}({text}){'' if ends else '(?s:.*)'}/"


def _escape(part: str) -> str:
    """Part of a pattern as it stands in a grammar: on one line, between slashes."""
    part = r"\/" if part == "/" else re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", part, flags=re.DOTALL)
    return re.sub(r"\\?([\x00-\x1f\x7f-\x9f\u2028\u2029])", lambda found: rf"\x{{{ord(found[1]):x}}}", part)


def read_properties(branch: Schema) -> tuple[Schema, set[str]]:
    """An object's properties in the order in which they are written, and which of them must be."""
    check_shape(branch)
    required: list[str] = branch.get("required") or []
    extra = branch.get("additionalProperties", True)
    properties: Schema = dict(branch.get("properties") or {})
    for name in required:
        if name not in properties and extra is False:
            raise BadSchema(f"the property {name!r} is required, and not allowed")
        properties.setdefault(name, extra if isinstance(extra, dict) else {})
    return {name: {} if inner is True else inner for name, inner in properties.items() if inner is not False}, {
        *required
    }
