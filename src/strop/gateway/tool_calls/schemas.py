"""A JSON Schema as a choice of simple ones, for notations that are not JSON, and its strings as plain text.

split({"type": ["string", "null"]})     [{"type": "string"}, {"type": "null"}]
split({"enum": ["a", 1]})               [{"const": "a"}, {"const": 1}]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def split(schema: Any, root: Schema) -> list[Schema]:
    """Schemas of one kind or one value each, any of which a value may follow; {} allows anything. Raises `BadSchema`
    for keywords that are not held to here."""
    schema = resolve(schema, root)
    if "$ref" in schema:
        raise BadSchema(f"$ref {schema['$ref']!r} leads nowhere")
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
    if options := schema.get("anyOf"):
        return [one for option in options for one in split(option, root)]
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


def _read_pattern(pattern: str) -> str:
    """A pattern, which may match anywhere, as one of the whole text."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    if re.search(r"(?<![\\\[])[$^]", inner) or ((begins or ends) and _has_choice(inner)):
        raise BadSchema(f"in this model's form of a call no grammar holds to the pattern {pattern!r}")
    inner = re.sub(r"(?<!\\)/", r"\/", inner)
    return f"/{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}/"


def _has_choice(pattern: str) -> bool:
    """Whether there is a | outside of brackets."""
    depth = 0
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        depth += (part in ("(", "[")) - (part in (")", "]"))
        if part == "|" and depth == 0:
            return True
    return False


def read_properties(branch: Schema) -> tuple[Schema, set[str]]:
    """An object's properties in the order in which they are written, and which of them must be."""
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
