"""Values written as text get the types their schema gives them."""

from typing import Any

import pytest

from strop.gateway.tool_calls.values import Scan, Unreadable, decode, end_of_json, parse_literal, parse_typed


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", {"type": "string"}, "007"),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"type": ["string", "null"]}, "7"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7),
        ("7", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, 7.0),
        ("7.5", {"type": "integer"}, "7.5"),
        ("7", {"type": "number"}, 7),
        ("False", {"type": "boolean"}, False),
        ("true", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ("[1, 2]", {"type": "object"}, "[1, 2]"),
        ("oops", {"type": "integer"}, "oops"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("7", {}, 7),
        ("7", None, 7),
        ("a b", None, "a b"),
        ("True", None, "True"),
        ("7", {"$ref": "#/x"}, 7),
    ],
)
def test_typed(text: str, schema: Any, value: Any) -> None:
    found = parse_typed(text, schema)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["a", "f()", "{1: 2}", "{**a}", "b'x'", "1e999", "-1e999", r"'\ud83d'", "{1}", "1 + 1", "", "9" * 5000, "(" * 999],
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_literal(text)


@pytest.mark.parametrize("text", ['{"a": "\\"}"}', '[[1, {"b": ["]"]}], "\\\\"]', "{}"])
def test_ends_are_found_in_any_pieces(text: str) -> None:
    scan = Scan()
    for length in range(1, len(text)):
        assert end_of_json(text[:length], 0, scan) is None
        scan.seen = length
    assert end_of_json(text + " }", 0, scan) == len(text)
    with pytest.raises(Unreadable):
        decode(text[:-1])
