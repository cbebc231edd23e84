"""What answers can be held to, and why other requests are refused."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from strop.gateway.dialects.base import AnswerSchema, ApiError, ModelRequest
from strop.gateway.dialects.chat import ChatCompletions
from strop.gateway.dialects.messages import Messages
from strop.gateway.dialects.responses import Responses
from strop.gateway.prescribe import NOT_HELD, make_grammar, tell_unheld
from strop.gateway.route import PolicyRoute
from strop.gateway.template import Renderer
from strop.types import AnswerGrammar, Sampling
from tests.chatml import TEMPLATE

HI = [{"role": "user", "content": "hi"}]
ADD: Any = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]
NUMBER = AnswerSchema({"type": "integer"}, "response_format")
NOT: Any = {"type": "object", "properties": {"a": {"not": {}}}}
OPENED = "<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
THINKS = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", OPENED)


def route(renderer: Renderer, *, holds: bool = True) -> PolicyRoute:
    nobody: Any = SimpleNamespace(holds_to_schemas=holds)
    return PolicyRoute(
        policy="p",
        model="m",
        engine=nobody,
        renderer=renderer,
        sampling_for=lambda _: Sampling(),
    )


def made(renderer: Renderer, lead: str = "", **asked: Any) -> AnswerGrammar | None:
    return make_grammar(ModelRequest(**{"messages": HI, **asked}), route(renderer), lead)


def test_an_answer_ends_with_the_tokens_that_end_a_turn(renderer: Renderer) -> None:
    grammar = made(renderer, schema=NUMBER)
    assert grammar is not None
    assert grammar.ends == tuple(sorted(renderer.stop_ids))
    assert grammar.version.startswith("llguidance@")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none", "strict": frozenset({"add"})},
    ],
)
def test_what_may_be_anything_has_no_grammar(renderer: Renderer, asked: dict[str, Any]) -> None:
    assert made(renderer, **asked) is None


@pytest.mark.parametrize(
    ("asked", "allowed", "forbidden"),
    [
        (
            {"tools": TOOLS, "strict": frozenset({"add"})},
            [
                "hi",
                '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call> x',
                '<tool_call>\n{"name": "now", "arguments": {"b":1}}\n</tool_call>',
            ],
            ['<tool_call>\n{"name": "add", "arguments": {"a":"1"}}\n</tool_call>', '<tool_call>\n{"name": "sub"'],
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            [
                '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>\n'
                '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
            ],
            ["hi", '<tool_call>\n{"name": "add", "arguments": {}'],
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "tool": "add", "one_call": True},
            ['<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'],
            ['<tool_call>\n{"name": "now"', '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>\n'],
        ),
        (
            {"tools": [{"function": ADD | {"parameters": NOT}}], "tool_choice": "required"},
            ['<tool_call>\n{"name": "add", "arguments": {"b":1}}\n</tool_call>'],
            ["hi", '<tool_call>\n{"name": "sub"'],
        ),
        (
            {"tools": TOOLS, "schema": NUMBER},
            ["12", '<tool_call>\n{"name": "add", "arguments": {"b":1}}\n</tool_call>'],
            ["hi", "12 "],
        ),
        (
            {"tools": TOOLS, "schema": NUMBER, "strict": frozenset({"add"})},
            ["12"],
            ['<tool_call>\n{"name": "add", "arguments": {"b":1}}'],
        ),
    ],
)
def test_what_answers_may_be(renderer: Renderer, asked: Any, allowed: list[str], forbidden: list[str]) -> None:
    grammar = made(renderer, **asked)
    assert grammar is not None
    for text in allowed:
        assert follows(renderer, grammar, text), text
    for text in forbidden:
        assert not begins(renderer, grammar, text), text


def test_a_model_thinks_first_where_its_prompt_opens_a_thought_and_where_it_opens_it_itself(renderer: Renderer) -> None:
    thinker = Renderer(renderer.tokenizer, THINKS, specials={"eos_token": "<|im_end|>"})
    opened, own = made(thinker, "<think>\n", schema=NUMBER), made(thinker, schema=NUMBER)
    assert opened is not None
    assert own is not None
    thought = 'so: <tool_call> {"a": [7]</think\n</think>\n\n'
    assert follows(thinker, opened, f"{thought}12")
    assert not begins(thinker, opened, f"{thought}twelve")
    assert not follows(thinker, opened, "12"), "the thought goes on"
    assert follows(thinker, own, f"<think>{thought}12")
    assert follows(thinker, own, "12")
    closed = made(thinker, "<think>\n\n</think>\n\n", schema=NUMBER)
    assert closed is not None
    assert not begins(thinker, closed, "<think>")


def matcher_of(renderer: Renderer, grammar: AnswerGrammar) -> Any:
    from llguidance import LLMatcher, LLTokenizer

    size = renderer.num_ids
    tokenizer = LLTokenizer(renderer.tokenizer.to_str(), n_vocab=size, eos_token=list(grammar.ends))
    return LLMatcher(tokenizer, grammar.text, log_level=0)


def begins(renderer: Renderer, grammar: AnswerGrammar, text: str) -> bool:
    ids = renderer.encode(text)
    return matcher_of(renderer, grammar).try_consume_tokens(ids) == len(ids)


def follows(renderer: Renderer, grammar: AnswerGrammar, text: str) -> bool:
    ids, matcher = renderer.encode(text), matcher_of(renderer, grammar)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


STRICT = frozenset({"add"})


@pytest.mark.parametrize(
    ("change", "param", "why"),
    [
        ({"schema": NUMBER, "prefill": "The"}, "response_format", "beside the beginning of an answer"),
        ({"tools": TOOLS, "strict": STRICT, "prefill": "The"}, "tools", "beside the beginning of an answer"),
        ({"schema": AnswerSchema({"not": {}}, "text.format")}, "text.format", r'^text.format: .*"not"'),
        ({"tools": [{"function": ADD | {"parameters": NOT}}], "strict": STRICT}, "tools", r"^tools: .*'add'.*\"not\""),
        (
            {"tools": [{"function": ADD | {"parameters": NOT}}], "tool_choice": "required", "strict": STRICT},
            "tool_choice",
            r"'add'.*\"not\"",
        ),
        ({"tools": [{"function": ADD | {"parameters": {"type": "array"}}}], "strict": STRICT}, "tools", "not object"),
        (
            {"tools": [{"function": ADD | {"name": "a b"}}], "strict": frozenset({"a b"})},
            "tools",
            "'a b' is not a tool's",
        ),
    ],
)
def test_what_cannot_be_is_refused(renderer: Renderer, change: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        made(renderer, **change)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert "Fix: " in refused.value.message


def test_families_whose_calls_no_grammar_writes(renderer: Renderer) -> None:
    muse = Renderer(
        renderer.tokenizer,
        TEMPLATE + "{# <atem:function_calls> #}",
        specials={"eos_token": "<|im_end|>"},
        tools="template",
    )
    assert muse.format.name == "muse"
    with pytest.raises(ApiError, match=r"muse.*Fix: use tool_choice 'auto'"):
        made(muse, tools=TOOLS, tool_choice="required")
    with pytest.raises(ApiError, match=r"muse.*Fix: leave strict out"):
        made(muse, tools=TOOLS, strict=STRICT)


def test_an_engine_that_cannot_says_so(renderer: Renderer) -> None:
    cannot = route(renderer, holds=False)
    with pytest.raises(ApiError, match=r"cannot hold answers to a schema\. Fix: use engine\.name=embedded"):
        make_grammar(ModelRequest(messages=HI, schema=NUMBER), cannot, "")
    strict = ModelRequest(messages=HI, tools=TOOLS, strict=STRICT)
    assert make_grammar(strict, cannot, "") is None
    assert tell_unheld(strict, cannot).dropped == (NOT_HELD,)
    assert tell_unheld(strict, route(renderer)).dropped == ()


def test_apis_say_which_tools_are_strict() -> None:
    parameters = ADD["parameters"]
    chat = {"messages": HI, "tools": [{"type": "function", "function": ADD | {"strict": True}}, *TOOLS[1:]]}
    responses = {
        "input": "hi",
        "tools": [{"type": "function", "strict": True, **ADD}, {"type": "function", "name": "now"}],
    }
    messages = {
        "messages": HI,
        "max_tokens": 9,
        "tools": [
            {"name": "add", "input_schema": parameters, "strict": True},
            {"name": "now", "input_schema": {}, "strict": False},
        ],
    }
    for dialect, body in ((ChatCompletions(), chat), (Responses(), responses), (Messages(), messages)):
        assert dialect.read(json.dumps(body).encode()).strict == {"add"}
    space = {
        "input": "hi",
        "tools": [{"type": "namespace", "name": "m", "tools": [{"type": "function", "strict": True, **ADD}]}],
    }
    assert Responses().read(json.dumps(space).encode()).strict == {"m__add"}
    wrong = {"messages": HI, "tools": [{"type": "function", "function": ADD | {"strict": "yes"}}]}
    with pytest.raises(ApiError, match="strict"):
        ChatCompletions().read(json.dumps(wrong).encode())
