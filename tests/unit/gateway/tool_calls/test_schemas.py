"""Schemas as choices of simple ones, and what of them no notation but JSON holds to."""

from typing import Any

import pytest

from strop.gateway.tool_calls.schemas import is_free, read_properties, split
from strop.gateway.tool_calls.values import find_properties
from strop.models.grammar import BadSchema

ROOT: Any = {"$defs": {"kind": {"enum": ["a", "b"]}, "me": {"$ref": "#/$defs/kind"}}}


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
