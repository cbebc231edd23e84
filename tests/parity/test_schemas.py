"""Schemas by the hundred: recorded tools' and some made of JSON Schema's keywords. Answers that are drawn at random
under their grammars follow them, as an independent validator finds."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from strop.models.grammar import BadSchema, TokenMatcher
from tests.unit.models.test_grammar import ENDS, NANO, TOKENIZER, VOCABULARY, compile_schema, grammar_of, read

DATA = Path(__file__).parents[3] / "shared" / "data"
EVERY = int(os.environ.get("STROP_TEST_EVERY", "25"))
"""One of so many schemas is tried quickly."""
LONGEST = 600
PYTHON = {"dict": "object", "float": "number", "tuple": "array", "any": None, "String": "string", "Boolean": "boolean"}
"""How recordings name types that JSON Schema calls otherwise."""
CLOSING = [id for id in range(VOCABULARY) if TOKENIZER.decode([id]).strip() in ('"', "}", "]", "0", "1")]


def clean(schema: Any) -> Any:
    """A recorded schema in JSON Schema's words, without what only describes."""
    if isinstance(schema, list):
        return [clean(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: clean(value) for name, value in schema.items() if name not in ("default", "optional", "example")}
    if isinstance(kind := found.get("type"), str) and kind in PYTHON:
        found["type"] = PYTHON[kind]
        if found["type"] is None:
            del found["type"]
    return found


def list_recorded() -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((DATA / "bfcl").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            for function in json.loads(line).get("function") or ():
                found.setdefault(json.dumps(function["parameters"], sort_keys=True), clean(function["parameters"]))
    return list(found.values())


def make_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """One of JSON Schema's forms, nested at most three deep."""

    def choose_integer() -> dict[str, Any]:
        low = draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)}

    def choose_string() -> dict[str, Any]:
        least = draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}

    def choose_object() -> dict[str, Any]:
        names = draw.sample(["a", "b", "name", "an odd name", "sum", "ö"], draw.randint(1, 4))
        properties = {name: make_schema(draw, depth + 1) for name in names}
        required = draw.sample(names, draw.randint(0, len(names)))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def choose_array() -> dict[str, Any]:
        least = draw.randint(0, 2)
        return {
            "type": "array", "items": make_schema(draw, depth + 1), "minItems": least,
            "maxItems": least + draw.randint(0, 3),
        }  # fmt: skip

    def choose_tuple() -> dict[str, Any]:
        items = [make_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    leaves = [
        choose_integer,
        choose_string,
        lambda: {"type": draw.choice(["boolean", "null", "number"])},
        lambda: {"enum": draw.sample(["red", 'a "quote"', 1, 2.5, None, True, "ß"], draw.randint(1, 4))},
        lambda: {"const": draw.choice(["x", 7, {"k": [1]}])},
        lambda: {"type": "string", "pattern": draw.choice(["^[a-c]{2,4}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{4}$"])},
        lambda: {"type": "string", "format": draw.choice(["date", "ipv4", "uuid"])},
        lambda: {"type": ["string", "null"], "maxLength": 5},
    ]
    nested = [
        choose_object,
        choose_object,
        choose_array,
        choose_tuple,
        lambda: {"anyOf": [make_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]},
        lambda: {"$defs": {"it": choose_integer()}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 3},
    ]
    if depth:
        nested.pop()  # what it refers to is at the top
    return draw.choice(leaves if depth > 2 else leaves + 2 * nested)()


def draw_text(schema: dict[str, Any], draw: random.Random) -> str | None:
    """At random among what is allowed, the longer it gets the rather what closes something; None if it is cut off."""
    matcher, ids = TokenMatcher(NANO, VOCABULARY, grammar_of(schema)), list[int]()
    while len(ids) < LONGEST:
        allowed = read(matcher)
        ending = [id for id in (*ENDS, *CLOSING) if id in allowed]
        token = draw.choice(ending if ending and draw.random() < 0.2 + len(ids) / 100 else sorted(allowed))
        matcher.take(token)
        if token in ENDS:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
    return None


def follow(schemas: list[dict[str, Any]], answers: int) -> tuple[int, list[str]]:
    """How many of them compile, and what does not follow. Python knows no year 0, which dates may have."""
    compiled, wrong = 0, list[str]()
    for number, schema in enumerate(schemas):
        draw = random.Random(number)
        try:
            compile_schema(schema)
        except BadSchema:
            continue
        compiled += 1
        validator = Draft202012Validator(schema, format_checker=FormatChecker(["ipv4", "uuid"]))
        texts = [text for _ in range(2 * answers) if (text := draw_text(schema, draw)) is not None][:answers]
        for text in texts:
            try:
                errors = [error.message for error in validator.iter_errors(json.loads(text))]
            except json.JSONDecodeError as error:
                errors = [str(error)]
            wrong += [f"{schema}: {text!r}: {error}" for error in errors]
        if not texts:
            wrong.append(f"{schema}: no answer came to its end")
    return compiled, wrong


def sampled(schemas: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from schemas[::EVERY]


def make_all() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [make_schema(draw) for _ in range(600)]


def test_some_of_those_that_were_made() -> None:
    schemas = [*sampled(make_all())]
    compiled, wrong = follow(schemas, answers=4)
    assert not wrong, wrong[:3]
    assert compiled == len(schemas)


@pytest.mark.skipif(not DATA.is_dir(), reason="there are no recordings here")
def test_recorded_tools_compile() -> None:
    schemas = list_recorded()
    assert len(schemas) > 1000
    refused = [schema for schema in schemas if not compiles(schema)]
    assert len(refused) < 0.05 * len(schemas), [*map(str, refused[:3])]


def compiles(schema: dict[str, Any]) -> bool:
    try:
        compile_schema(schema)
    except BadSchema:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not DATA.is_dir(), reason="there are no recordings here")
def test_ten_answers_to_each_of_a_thousand() -> None:
    made, recorded = make_all(), list_recorded()
    for schemas, least in ((made, 1.0), (recorded[:: max(1, len(recorded) // 450)], 0.95)):
        compiled, wrong = follow(schemas, answers=10)
        assert not wrong, (len(wrong), wrong[:3])
        assert compiled >= least * len(schemas)
