"""Calls in a history whose arguments are no JSON object: they are shown, and what was sampled stays as it is."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from strop.gateway.contexts import History
from strop.gateway.dialects.base import Dialect, ModelRequest
from strop.gateway.dialects.chat import ChatCompletions
from strop.gateway.dialects.responses import Responses
from strop.gateway.template import Renderer
from strop.types import Turn
from tests.chatml import TEMPLATE
from tests.unit.gateway.test_session import Desk, said, user

RAW = ['{"path": "a.tx', "[1]", "null", "ls -l", '"quoted"']
SPECIALS = {"eos_token": "<|im_end|>"}
ARGUMENTS = "{{ call.function.arguments | tojson }}"
STRING = "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
ITEMS = "{% for name, value in call.function.arguments | items %}{{ name }}={{ value | tojson }};{% endfor %}"
METHOD = "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }};{% endfor %}"
PARSES = "{% for name in call.function.arguments %}{{ name }}={{ call.function.arguments[name] }};{% endfor %}"
NO_CALLS = TEMPLATE[: TEMPLATE.index("{%- for call")] + TEMPLATE[TEMPLATE.index("<|im_end|>\n{% endfor %}") :]


def made(renderer: Renderer, arguments: str) -> Renderer:
    assert ARGUMENTS in TEMPLATE
    return Renderer(renderer.tokenizer, TEMPLATE.replace(ARGUMENTS, arguments), specials=SPECIALS)


def history(raw: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": raw}}
    return [
        user("hi"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
    ]


def read(messages: list[dict[str, Any]]) -> ModelRequest:
    return ChatCompletions().read(json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("arguments", [ARGUMENTS, STRING, ITEMS, METHOD, PARSES])
def test_every_template_shows_them(renderer: Renderer, arguments: str, raw: str) -> None:
    shown = made(renderer, arguments).text(read(history(raw)).messages, None, generate=True)
    inner = json.dumps(raw, ensure_ascii=False)[1:-1]
    if arguments == STRING:
        assert f'"arguments": {raw}}}' in shown
    elif arguments == ARGUMENTS:
        assert f'"arguments": "{inner}"}}' in shown
    else:
        assert f"arguments={raw if arguments == PARSES else json.dumps(raw)};" in shown


@pytest.mark.parametrize("raw", RAW)
def test_a_template_without_calls_has_them_written_into_the_messages(renderer: Renderer, raw: str) -> None:
    without = Renderer(renderer.tokenizer, NO_CALLS, specials=SPECIALS)
    shown = without.text(read(history(raw)).messages, None, generate=True)
    assert f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>' in shown


@pytest.mark.parametrize("raw", RAW)
def test_responses_read_them_as_chat_completions_do(raw: str) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": raw},
        {"type": "function_call_output", "call_id": "c1", "output": "no"},
    ]
    api: Dialect = Responses()
    ours = api.read(json.dumps({"input": items}).encode()).messages[1]["tool_calls"]
    assert ours == read(history(raw)).messages[1]["tool_calls"]
    assert ours[0]["function"]["arguments"] == raw


@pytest.mark.parametrize("how", ["sampled", "template"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, STRING, ITEMS])
def test_a_conversation_with_them_goes_on_exactly(renderer: Renderer, arguments: str, how: History) -> None:
    """What the model says after them is given back as it was sampled."""
    desk = Desk(made(renderer, arguments))
    desk.route = replace(desk.route, history=how)
    first = desk.ask(history("{bad"), "I see.")
    check_goes_on(first, desk.ask([*history("{bad"), said(first), user("And?")], "Bye."))


def check_goes_on(first: Turn, second: Turn) -> None:
    assert (second.parent, second.branch, second.shared) == (first.id, None, len(first.ids))
    assert second.prompt_ids[: second.shared] == first.ids


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_a_call_that_was_said_badly_is_text_and_stays_the_sampled_tokens(renderer: Renderer) -> None:
    bad = '<tool_call>\n{"name": "f", "arguments": {"path": "a.tx}\n</tool_call>'
    desk = Desk(renderer)
    first = desk.ask([user("hi")], bad, tools=TOOLS)
    assert first.answer["content"] == bad
    check_goes_on(first, desk.ask([user("hi"), said(first), user("That is no JSON.")], "Sorry.", tools=TOOLS))


def test_an_agent_that_breaks_what_the_model_called_has_edited_the_history(renderer: Renderer) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"path": "a.txt"}}\n</tool_call>'
    desk = Desk(renderer)
    first = desk.ask([user("hi")], good, tools=TOOLS)
    assert first.answer["tool_calls"][0]["function"]["arguments"] == {"path": "a.txt"}
    assert desk.ask(history('{"path": "a.tx'), "ok", tools=TOOLS).branch == "edited_history"


def test_what_pythons_json_writes_is_read() -> None:
    arguments = read(history('{"x": NaN, "y": Infinity}')).messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments["y"] == float("inf")
