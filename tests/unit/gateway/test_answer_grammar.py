"""What becomes of tools that are not strict, in every family's form of a call."""

from typing import Any

import pytest

from strop.gateway.answer_grammar import AnswerForm, CallableTool, write_answer
from strop.gateway.tool_calls.families import FAMILIES
from strop.gateway.tool_calls.reader import Grammar
from strop.models.grammar import VERSION, BadSchema, OutOfGrammar, TokenMatcher
from strop.models.lark import MarkTokens
from strop.types import AnswerGrammar
from tests.unit.models.test_grammar import ENDS, NANO, TOKENIZER, VOCABULARY

TEXT: Any = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
STRICT = CallableTool("strict", TEXT, True)
ODD: list[tuple[str, Any]] = [
    ("g", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}),
    ("g", {"type": "object", "oneOf": [{"required": ["x"]}], "properties": {"x": {}}}),
    ("g", {"type": "object", "properties": {"x": {"type": "string", "format": "nothing-known"}}}),
    ("g", {"type": "object", "properties": {"from": {"type": "string"}, "a b": {}, "c": {}}, "required": ["a b"]}),
    ("g", {"type": ["object", "null"], "properties": {"x": 5}}),
    ("g", {"type": "object", "properties": 5}),
    ("mcp:g", {"type": "object"}),
]
WRITTEN = [one for one in FAMILIES if one.form is not None]
HERMES = next(one for one in FAMILIES if one.name == "hermes")
QWEN = next(one for one in FAMILIES if one.name == "qwen-xml")


def write(format: Grammar, *tools: CallableTool, required: bool = True) -> str:
    return write_answer(format, MarkTokens.of(TOKENIZER, ENDS), AnswerForm(tools=tools, required=required))


def holds(text: str, answer: str) -> bool:
    matcher = TokenMatcher(NANO, VOCABULARY, AnswerGrammar(text=text, ends=ENDS, version=VERSION))
    try:
        for id in [*TOKENIZER.encode(answer).ids, ENDS[0]]:
            matcher.take(id)
    except OutOfGrammar:
        return False
    return True


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("format", WRITTEN, ids=lambda format: format.name)
def test_a_tool_that_is_not_strict_is_never_why_a_request_is_refused(format: Grammar, required: bool) -> None:
    for name, schema in ODD:
        if required or format.name != "functionary-v3.2":
            write(format, STRICT, CallableTool(name, schema, False), required=required)


def qwen(name: str, **arguments: str) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def test_a_call_that_is_required_follows_the_schema_where_a_grammar_can_be_made_of_it() -> None:
    grammar = write(QWEN, CallableTool("f", TEXT, False), CallableTool("g", ODD[0][1], False))
    assert holds(grammar, qwen("f", a="Paris"))
    assert not holds(grammar, qwen("f"))
    assert holds(grammar, qwen("g", x="[1, 1]"))
    assert holds(grammar, qwen("g", other="x"))


def test_a_strict_tool_is_refused_by_name_instead() -> None:
    for name, schema in ODD[:1] + ODD[-2:]:
        with pytest.raises(BadSchema, match=repr(name)):
            write(
                QWEN if name == "g" else next(one for one in FAMILIES if one.name == "gemma4"),
                CallableTool(name, schema, True),
            )


def test_a_schema_without_an_end_is_refused_by_name() -> None:
    deep: Any = {"type": "string"}
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(BadSchema, match="'f' cannot be held to: it is nested too deep"):
        write(QWEN, CallableTool("f", {"properties": {"a": deep}}, True))


def test_a_pattern_that_the_library_does_not_know_is_refused_by_its_tools_name() -> None:
    ahead: Any = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=b)c$"}}}
    for strict in (True, False):
        with pytest.raises(BadSchema, match="the parameters of 'f' cannot be held to"):
            write(QWEN, STRICT, CallableTool("f", ahead, True), required=strict)
    grammar = write(QWEN, STRICT, CallableTool("f", ahead, False))
    assert holds(grammar, qwen("f", a="x"))
    assert not holds(grammar, qwen("strict"))
