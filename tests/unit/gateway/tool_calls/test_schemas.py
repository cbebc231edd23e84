"""Schemas as choices of simple ones, and what of them no notation but JSON holds to."""

from typing import Any

import pytest

from strop.gateway.tool_calls.schemas import is_free, read_properties, split, write_string
from strop.gateway.tool_calls.values import find_properties
from strop.models.grammar import VERSION, BadSchema, OutOfGrammar, TokenMatcher
from strop.models.lark import Lark, MarkTokens
from strop.types import AnswerGrammar
from tests.unit.models.test_grammar import ENDS, NANO, TOKENIZER, VOCABULARY

LOOP: Any = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}
ROOT: Any = {"$defs": {"kind": {"enum": ["a", "b"]}, "me": {"$ref": "#/$defs/kind"}, "loop": LOOP}}


@pytest.mark.parametrize(
    ("schema", "branches"),
    [
        ({}, [{}]),
        ({"type": ["string", "null"]}, [{"type": "string"}, {"type": "null"}]),
        ({"enum": ["a", 1, None], "type": ["string", "null"]}, [{"const": "a"}, {"const": None}]),
        ({"$ref": "#/$defs/me"}, [{"const": "a"}, {"const": "b"}]),
        ({"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]}, [{"const": "a"}, {"const": "b"}, {"type": "null"}]),
        ({"items": {}}, [{"items": {}, "type": "array"}]),
    ],
)
def test_a_schema_is_a_choice_of_simple_ones(schema: Any, branches: Any) -> None:
    assert [{key: one[key] for key in one if key != "enum"} for one in split(schema, ROOT)] == branches


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"allOf": []}, "no grammar holds to allOf"),
        ({"not": {}, "oneOf": []}, "oneOf, not|not, oneOf"),
        ({"$ref": "#/$defs/nobody"}, "leads nowhere"),
        ({"$ref": "#/$defs/loop"}, r"'#/\$defs/loop' leads nowhere, back to itself"),
        ({"pattern": 5}, "its pattern 5 is not a text"),
        ({"required": 5}, "its required 5 is not a list of names"),
        ({"required": [5]}, "is not a list of names"),
        ({"enum": 5}, "its enum 5 is not a list of values"),
        ({"format": ["x"]}, "is not a text"),
        ({"anyOf": [5]}, "is not a list of schemas"),
        ({"minLength": -1}, "its minLength -1 is not a count"),
        ({"properties": {"a": 5}}, "is not a table of schemas"),
        (5, "5 is not a schema"),
        ({"type": "boolean", "enum": ["yes"]}, "none of .* is of type boolean"),
    ],
)
def test_what_is_not_held_to_is_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(BadSchema, match=why):
        split(schema, ROOT)


def test_values_that_whatever_is_of_their_kind_follows() -> None:
    assert is_free({"type": "integer"})
    assert not is_free({"type": "integer", "minimum": 0})
    assert not is_free({"type": "array"})


def test_properties_stand_in_their_order_and_those_that_must_be_there_are_there() -> None:
    found, required = read_properties({"properties": {"b": {}, "a": True, "c": False}, "required": ["d", "a"]})
    assert ([*found], required) == (["b", "a", "d"], {"d", "a"})
    with pytest.raises(BadSchema, match="'d' is required, and not allowed"):
        read_properties({"required": ["d"], "additionalProperties": False})


def test_readers_know_the_kind_of_what_a_schema_only_refers_to() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/text"}},
        "$defs": {"text": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert find_properties(tools, "f") == {"a": {"type": "string"}}


def test_readers_come_to_an_end_where_a_schema_refers_to_itself() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": LOOP}}
    found = find_properties([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "f")
    assert found == {"a": LOOP}


def holds(pattern: str, text: str) -> bool:
    rules = Lark(MarkTokens.of(TOKENIZER, ENDS))
    grammar = rules.write(write_string(rules, {"pattern": pattern}, []))
    matcher = TokenMatcher(NANO, VOCABULARY, AnswerGrammar(text=grammar, ends=ENDS, version=VERSION))
    try:
        for id in [*TOKENIZER.encode(text).ids, ENDS[0]]:
            matcher.take(id)
    except OutOfGrammar:
        return False
    return True


@pytest.mark.parametrize(
    ("pattern", "fits", "misses"),
    [
        ("a\nstart: b", "xa\nstart: b", "ab"),
        ("^a\\\nb$", "a\nb", "ab"),
        ("^a/b$", "a/b", "ab"),
        (r"^a\/b$", "a/b", r"a\/b"),
        (r"^a\\/b$", r"a\/b", "a/b"),
        ("^[/\t]$", "\t", "x"),
        (r"^[\]/]$", "]", "["),
        (r"^\$\\$", "$\\", "$"),
    ],
)
def test_a_pattern_means_the_same_in_a_grammar(pattern: str, fits: str, misses: str) -> None:
    assert holds(pattern, fits)
    assert not holds(pattern, misses)


@pytest.mark.parametrize("pattern", ["a)|(b", "a$b", r"a\\$b", "^a|b", "[a&&b]", "(a"])
def test_patterns_that_would_mean_something_else_are_refused(pattern: str) -> None:
    with pytest.raises(BadSchema, match="no grammar holds to the pattern"):
        holds(pattern, "a")


def test_references_that_double_references_are_refused() -> None:
    """Followed, they come to 2^40 schemas."""
    steps = {f"s{i}": {"anyOf": [{"$ref": f"#/$defs/s{i + 1}"}, {"$ref": f"#/$defs/s{i + 1}"}]} for i in range(40)}
    root = {"$defs": {**steps, "s40": {"type": "integer"}}}
    with pytest.raises(BadSchema, match="too many others"):
        split({"$ref": "#/$defs/s0"}, root)
