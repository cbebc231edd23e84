"""How families write a call's arguments, as grammars that follow the tool's schema.

    Json()                        {"city": "Paris", "days": 3}
    Tags("<parameter=", ...)      <parameter=city>\\nParis\\n</parameter>         strings as they are, all else as JSON
    Python()                      (city="Paris", days=3, hot=True)
    Quoted('<|"|>')               {city:<|"|>Paris<|"|>,days:3}
    NestedTags("]<]minimax[>[")   <city>Paris</city><days>3</days>               each tag after that mark

JSON is llguidance's own. The others write what tools have mostly: kinds, `properties` and `required` in their order,
`items` with their number, `enum`, `const`, `anyOf`, `$ref`; other keywords are refused by name. Properties that are not
named may be there only if none is.
"""

from __future__ import annotations

import json
import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from strop.gateway.tool_calls.schemas import KINDS, is_free, read_properties, split, write_string
from strop.gateway.tool_calls.values import Schema, list_kinds, parse_typed, resolve
from strop.models.grammar import BadSchema
from strop.models.lark import Lark, quote

ESCAPES = 'nrbtf\\\\"'
"""In strings of calls. A character by its number may be half of one, and no reader takes that."""
KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,40}/"
"""Of arguments that no schema names."""
JSON_NAMES = {"integer": "number"}
"""Kinds that JSON calls otherwise than its schemas."""


class Arguments(ABC):
    """One way to write them. `opening` stands before the first always."""

    opening: str = ""

    @abstractmethod
    def write(self, rules: Lark, schema: Schema) -> str:
        """The name of a rule: the arguments that a schema allows, without `opening`. Raises `BadSchema`."""

    def loosen(self, schema: Schema) -> Schema:
        """For a tool whose arguments may be anything: as much of its schema as this way to write them needs."""
        return {}


class Json(Arguments):
    def write(self, rules: Lark, schema: Schema) -> str:
        if schema.get("type", "object") != "object":
            raise BadSchema("its type is not object")
        return rules.json({"type": "object", **schema}, escapes=ESCAPES)


def split_object(schema: Schema) -> Schema:
    """The schema of a call's arguments."""
    branches = split({"type": "object", **schema}, schema)
    if len(branches) != 1 or branches[0].get("type") != "object":
        raise BadSchema("its type is not object")
    return branches[0]


def write_plain(rules: Lark, schema: Schema, root: Schema, unsaid: Sequence[str], close: str) -> list[str]:
    """Ways to write a value as plain text, of which the reader tells by the schema what it is, and `close` after it."""
    branches, seen = split(schema, root), list_kinds(schema)
    values = [branch["const"] for branch in branches if "const" in branch]
    written = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    for value, text in zip(values, written, strict=True):
        if parse_typed(text, schema) != value or any(one in text for one in unsaid):
            raise BadSchema(f"in this model's form of a call the value {value!r} cannot be told from others")
    strings = [branch for branch in branches if branch.get("type") == "string"]
    others = [branch for branch in branches if "const" not in branch and branch.get("type") not in (None, "string")]
    told = {*seen} == {"string"} or ("string" in seen and not values and all(map(is_free, others)))
    texts = [quote(text) for text in written]
    texts += [write_string(rules, branch, unsaid, told=told) for branch in strings]
    texts += [WORDS[branch["type"]] for branch in others if is_free(branch)]
    texts += [write_string(rules, {}, unsaid)] if {} in branches else []
    found = [JsonValues(unsaid).write_value(rules, branch, root, {}) for branch in others if not is_free(branch)]
    ways = [f"({' | '.join(found)}) {rules.spell(close)}"] if found else []
    return [rules.until(rules.terminal(" | ".join(texts)), close), *ways] if texts else ways


class Tags(Arguments):
    """Each argument after `open`, in which {key} stands for its name, and before `close`. Where a tag tells whether a
    value is text, `kinds` are what stands in it for {kind}: if it is, and if it is not ({json} is what JSON calls it);
    `raw` then is what stands around text. Neither `close` nor `unsaid` may stand in text."""

    def __init__(
        self, open: str, close: str, *, unsaid: Sequence[str] = (), kinds: tuple[str, str] | None = None,
        raw: tuple[str, str] = ("", ""),
    ) -> None:  # fmt: skip
        self._open, self._close, self._kinds, self._raw = open, close, kinds, raw
        self._unsaid = tuple(filter(None, (close.strip(), raw[1], *unsaid)))

    def write(self, rules: Lark, schema: Schema) -> str:
        table = split_object(schema)
        properties, required = read_properties(table)
        if not properties:
            none = table.get("additionalProperties") is False
            return rules.rule('""' if none else f"({self._pair(rules, rules.terminal(KEY), {}, schema)})*")
        pairs: list[str] = []
        for name, inner in properties.items():
            if not re.fullmatch(r'[^\s<>"|]+', name):
                raise BadSchema(f"in this model's form of a call {name!r} cannot be a property's name")
            pair = self._pair(rules, quote(name), inner, schema)
            pairs.append(f"({pair})" + ("" if name in required else "?"))
        return rules.rule(" ".join(pairs))

    def _pair(self, rules: Lark, key: str, schema: Any, root: Schema) -> str:
        schema = resolve(schema, root)
        if self._kinds is None:
            return self._tagged(rules, key, "", write_plain(rules, schema, root, self._unsaid, self._close))
        text, other = self._kinds
        texts: list[str] = []
        pairs: list[str] = []
        for branch in split(schema, root):
            value, kind = branch.get("const"), branch.get("type", "string")
            if isinstance(value, str):
                texts.append(quote(value))
            elif kind == "string" and "const" not in branch:
                texts.append(write_string(rules, branch, self._unsaid))
            else:
                kind = max(list_kinds({"enum": [value]})) if "const" in branch else kind
                written = JsonValues(self._unsaid).write_value(rules, branch, root, {})
                pairs.append(
                    self._tagged(
                        rules,
                        key,
                        other.replace("{json}", JSON_NAMES.get(kind, kind)),
                        [f"{written} {rules.spell(self._close)}"],
                    )
                )
        if texts:
            before, after = self._raw
            value = rules.until(rules.terminal(" | ".join(texts)), after + self._close)
            pairs.insert(0, self._tagged(rules, key, text + before, [value]))
        return " | ".join(pairs)

    def _tagged(self, rules: Lark, key: str, kind: str, values: Sequence[str]) -> str:
        """The argument of this name; what closes it is part of the values."""
        before, _, after = self._open.partition("{key}")
        return f"{rules.spell(before)} {key} {rules.spell(after.replace('{kind}', kind))} ({' | '.join(values)})"


class Literals(Arguments):
    """Values that have others in them, piece by piece. `table`, `array` and `between` are what stands around and
    between their parts, `words` how true, false and null are written."""

    table = array = ("", "")
    between = ""
    repeats = True
    words = ("true", "false", "null")

    def write(self, rules: Lark, schema: Schema) -> str:
        table = split_object(schema)
        return rules.rule(self.write_table(rules, table, schema, {}, begun=True))

    def loosen(self, schema: Schema) -> Schema:
        """Arguments of the names that a schema has, each of which may be anything or left out."""
        properties: Any = schema.get("properties")
        names = (
            [name for name in cast(Schema, properties) if self.can_write(name)] if isinstance(properties, dict) else []
        )
        return {"properties": {name: {} for name in names}} if names else {}

    def can_write(self, name: str) -> bool:
        """Whether an argument may be called so."""
        return True

    @abstractmethod
    def write_text(self, rules: Lark, branch: Schema) -> str:
        """A string."""

    @abstractmethod
    def write_const(self, rules: Lark, value: Any) -> str: ...

    @abstractmethod
    def write_pair(self, rules: Lark, key: str | None, value: str) -> str:
        """A key with its value; any key if it is None."""

    def write_item(self, rules: Lark, value: str) -> str:
        return value

    def write_value(self, rules: Lark, schema: Any, root: Schema, known: dict[str, str]) -> str:
        """The name of a rule. `known` are those of schemas that may have themselves in them."""
        text = json.dumps(schema, sort_keys=True)
        if text not in known:
            known[text] = name = rules.reserve()
            rules.define(name, " | ".join(self._write_ways(rules, split(schema, root), root, known)))
        return known[text]

    def _write_ways(self, rules: Lark, branches: Sequence[Schema], root: Schema, known: dict[str, str]) -> list[str]:
        return [self._write_branch(rules, branch, root, known) for branch in branches]

    def _write_branch(self, rules: Lark, branch: Schema, root: Schema, known: dict[str, str]) -> str:
        if "const" in branch:
            return self.write_const(rules, branch["const"])
        match branch.get("type"):
            case "string":
                return self.write_text(rules, branch)
            case "integer" | "number" as kind:
                return rules.terminal(NUMBERS[kind]) if is_free(branch) else rules.json(branch)
            case "boolean":
                return " | ".join(map(quote, self.words[:2]))
            case "null":
                return quote(self.words[2])
            case "array":
                return self._write_array(rules, branch, root, known)
            case "object":
                return self.write_table(rules, branch, root, known)
            case None:
                return self.write_value(rules, {"type": [*KINDS]}, root, known)
            case kind:
                raise BadSchema(f"the type {kind!r} is not one of JSON Schema's")

    def _write_array(self, rules: Lark, branch: Schema, root: Schema, known: dict[str, str]) -> str:
        item = self.write_item(rules, self.write_value(rules, branch.get("items", {}), root, known))
        least, most = branch.get("minItems", 0), branch.get("maxItems")
        begin, end = (rules.spell(text) for text in self.array)
        if most == 0:
            return f'{begin} {end} ""'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = item if most == 1 else f"{item} ({rules.spell(self.between)} {item}){times}"
        return f"{begin} {some if least else f'({some})?'} {end}"

    def write_table(
        self, rules: Lark, branch: Schema, root: Schema, known: dict[str, str], *, begun: bool = False
    ) -> str:
        properties, required = read_properties(branch)
        begin, end = (rules.spell(text) for text in self.table)
        begin = "" if begun else begin
        if not properties:
            extra = branch.get("additionalProperties", True)
            if extra is False:
                return f'{begin} {end} ""'
            value = self.write_value(rules, extra if isinstance(extra, dict) else {}, root, known)
            pair = self.write_pair(rules, None, value)
            more = f"({rules.spell(self.between)} {pair})*" if self.repeats else ""
            return f"{begin} ({pair} {more})? {end}"
        pairs = [
            (self.write_pair(rules, name, self.write_value(rules, inner, root, known)), name in required)
            for name, inner in properties.items()
        ]
        return f"{begin} {self._join(rules, pairs)} {end}"

    def _join(self, rules: Lark, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs in their order, some of which may be left out, with what stands between two."""
        first = then = '""'  # what follows where nothing stands yet, and where something does
        between = rules.spell(self.between)
        for pair, needed in reversed(pairs):
            first, then = (
                f"{pair} {then}" if needed else f"({pair} {then} | {first})",
                f"{between} {pair} {then}" if needed else f"({between} {pair})? {then}",
            )
            first, then = rules.rule(first), rules.rule(then)
        return first


NUMBERS = {
    "integer": r"/-?(0|[1-9][0-9]{0,300})/",
    "number": r"/-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?/",
}
"""Without an exponent, which could make one that no machine can hold."""
WORDS = {**NUMBERS, "boolean": '"true" | "false"', "null": '"null"'}
"""Values that are plain text in every notation."""


class JsonValues(Literals):
    """JSON in which none of `unsaid` stands, as far as strings are not held to a pattern or a format."""

    table, array = ("{", "}"), ("[", "]")
    between = ", "

    def __init__(self, unsaid: Sequence[str]) -> None:
        self._unsaid = unsaid

    def write_text(self, rules: Lark, branch: Schema) -> str:
        if "pattern" in branch or "format" in branch:
            return rules.json(branch, escapes=ESCAPES)
        least, most = branch.get("minLength", 0), branch.get("maxLength")
        times = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        text = rules.terminal(r"/(?s:.)*/")
        unsaid = [f"~({text} {quote(json.dumps(one, ensure_ascii=False)[1:-1])} {text})" for one in self._unsaid]
        return rules.terminal(" & ".join([rf'/"([^"\\\x00-\x1f]|\\[nrbtf"\\]){times}"/', *unsaid]))

    def write_const(self, rules: Lark, value: Any) -> str:
        return quote(json.dumps(value, ensure_ascii=False))

    def write_pair(self, rules: Lark, key: str | None, value: str) -> str:
        name = self.write_text(rules, {}) if key is None else quote(json.dumps(key, ensure_ascii=False))
        return f'{name} ": " {value}'


class Python(Literals):
    """Keyword arguments of a Python call."""

    opening = "("
    table, array = ("{", "}"), ("[", "]")
    between = ", "
    repeats = False
    words = ("True", "False", "None")

    def write(self, rules: Lark, schema: Schema) -> str:
        table = split_object(schema)
        properties, required = read_properties(table)
        known: dict[str, str] = {}
        if not properties and table.get("additionalProperties") is not False:
            pair = f'{rules.terminal(KEY_OF_PYTHON)} "=" {self.write_value(rules, {}, schema, known)}'
            return rules.rule(f'({pair})? ")"')
        pairs: list[tuple[str, bool]] = []
        for name, inner in properties.items():
            if not self.can_write(name):
                raise BadSchema(f"in this model's form of a call {name!r} cannot be a property's name")
            value = self.write_value(rules, inner, schema, known)
            pairs.append((f'{quote(name)} "=" {value}', name in required))
        return rules.rule(f'{self._join(rules, pairs)} ")"')

    def can_write(self, name: str) -> bool:
        return name.isidentifier() and not keyword.iskeyword(name)

    def write_text(self, rules: Lark, branch: Schema) -> str:
        return rules.json(branch, escapes=ESCAPES)

    def write_const(self, rules: Lark, value: Any) -> str:
        return quote(repr(value))

    def write_pair(self, rules: Lark, key: str | None, value: str) -> str:
        name = rules.json({"type": "string"}, escapes=ESCAPES) if key is None else quote(repr(key))
        return f'{name} ": " {value}'


KEY_OF_PYTHON = KEY + "".join(f' & ~"{word}"' for word in keyword.kwlist)


class Quoted(Literals):
    """Gemma's: strings between marks, in which neither the mark nor `close` may stand, and keys as they are."""

    opening = "{"
    table, array = ("{", "}"), ("[", "]")
    between = ","

    def __init__(self, mark: str, close: str) -> None:
        self._mark, self._close = mark, close

    def _write_ways(self, rules: Lark, branches: Sequence[Schema], root: Schema, known: dict[str, str]) -> list[str]:
        """Strings are one way: of several that begin alike only the longest would be followed."""
        unsaid = [self._mark, self._close]
        texts = [
            quote(self._check(branch["const"])) if "const" in branch else write_string(rules, branch, unsaid)
            for branch in branches
            if isinstance(branch.get("const"), str) or branch.get("type") == "string"
        ]
        others = [one for one in branches if not isinstance(one.get("const"), str) and one.get("type") != "string"]
        ways = super()._write_ways(rules, others, root, known)
        if texts:
            ways.append(f"{rules.spell(self._mark)} {rules.until(rules.terminal(' | '.join(texts)), self._mark)}")
        return ways

    def write_text(self, rules: Lark, branch: Schema) -> str:
        raise AssertionError("strings are written beside each other")

    def _check(self, text: str) -> str:
        if self._mark in text or self._close in text:
            raise BadSchema(f"in this model's form of a call the value {text!r} cannot be told from others")
        return text

    def write_const(self, rules: Lark, value: Any) -> str:
        return rules.spell(self._literal(value))

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            value = self._check(value)
            return f"{self._mark}{value}{self._mark}"
        if isinstance(value, dict):
            pairs = [f"{self._key(key)}:{self._literal(inner)}" for key, inner in cast(Schema, value).items()]
            return "{" + ",".join(pairs) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._literal, cast(list[Any], value))) + "]"
        return json.dumps(value)

    def _key(self, key: str) -> str:
        return key if re.fullmatch(r"\w+", key) else f"{self._mark}{key}{self._mark}"

    def write_pair(self, rules: Lark, key: str | None, value: str) -> str:
        name = rules.terminal(KEY) if key is None else rules.spell(self._key(key))
        return f'{name} ":" {value}'


class NestedTags(Literals):
    """MiniMax M3's tags, each after `space`; a value here ends with the beginning of the tag that closes it. What is
    text the reader tells by the schema. An object whose properties no schema names is empty: no grammar of this kind
    closes a tag with the very name that opened it."""

    def __init__(self, space: str) -> None:
        self._space, self._close = space, f"{space}</"

    def write_value(self, rules: Lark, schema: Any, root: Schema, known: dict[str, str]) -> str:
        text = json.dumps(schema, sort_keys=True)
        if text in known:
            return known[text]
        schema = resolve(schema, root)
        kinds = list_kinds(schema)
        branches = split(schema, root)
        inner = [one for one in branches if one.get("type") in ("array", "object")]
        if len(inner) > 1:
            raise BadSchema("in this model's form of a call an array cannot be told from an object")
        known[text] = name = rules.reserve()
        if not inner:
            ways = write_plain(rules, schema, root, [self._space], self._close)
        else:
            ways = [f"{self._write_branch(rules, inner[0], root, known)} {rules.spell(self._close)}"]
            if others := [one for one in branches if one not in inner]:
                if not kinds or any("const" in one or one["type"] == "string" for one in others):
                    raise BadSchema("in this model's form of a call a text cannot be told from an array or object")
                ways += write_plain(rules, {"anyOf": others}, root, [self._space], self._close)
        rules.define(name, " | ".join(ways))
        return name

    def can_write(self, name: str) -> bool:
        return bool(re.fullmatch(r"[^\s<>/]+", name))

    def write_text(self, rules: Lark, branch: Schema) -> str:
        raise AssertionError("values are plain text")

    def write_const(self, rules: Lark, value: Any) -> str:
        raise AssertionError("values are plain text")

    def write_pair(self, rules: Lark, key: str | None, value: str) -> str:
        assert key is not None
        if not self.can_write(key):
            raise BadSchema(f"in this model's form of a call {key!r} cannot be a property's name")
        return f"{rules.spell(f'{self._space}<{key}>')} {value} {quote(f'{key}>')}"

    def write_table(
        self, rules: Lark, branch: Schema, root: Schema, known: dict[str, str], *, begun: bool = False
    ) -> str:
        shown = branch if read_properties(branch)[0] else {"additionalProperties": False}
        return super().write_table(rules, shown, root, known, begun=begun)

    def write_item(self, rules: Lark, value: str) -> str:
        return self.write_pair(rules, "item", value)
