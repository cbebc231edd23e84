"""`null` is how many clients say nothing: it is accepted for any parameter, known or not, wherever parameters stand."""

import json
from typing import Any

import pytest

from strop.gateway.dialects import chat, completions, messages, responses
from strop.gateway.dialects.base import ApiError, Dialect, ModelRequest

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (chat, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}),
    (responses, {"input": [USER], "tools": [{"type": "function"} | FUNCTION]}),
    (messages, {"max_tokens": 9, "messages": [USER], "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    (completions, {"prompt": "hi"}),
]


SPOKEN: dict[Any, Dialect] = {
    chat: chat.ChatCompletions(),
    completions: completions.Completions(),
    responses: responses.Responses(),
    messages: messages.Messages(),
}


def read(dialect: Any, body: dict[str, Any]) -> ModelRequest:
    return SPOKEN[dialect].read(json.dumps(body).encode())


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_at_the_top(dialect: Any, body: dict[str, Any]) -> None:
    plain = read(dialect, body)
    unknown = ["audio", "prediction", "function_call", "functions", "guided_json", "container", "suffix", "made_up"]
    assert read(dialect, body | dict.fromkeys(unknown)) == plain
    known = {*dialect.FIELDS, *dialect.HARMLESS} - body.keys()
    assert read(dialect, body | dict.fromkeys(known)) == plain
    with pytest.raises(ApiError) as refused:
        read(dialect, body | {"made_up": 0, "audio": None})
    assert refused.value.param == "made_up"


WITHIN: list[tuple[Any, str, Any]] = [
    (chat, "stream_options", {"include_usage": True}),
    (chat, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (chat, "response_format", {"type": "text"}),
    (completions, "stream_options", {"include_usage": True}),
    (responses, "reasoning", {"effort": "low"}),
    (responses, "text", {"verbosity": "low", "format": {"type": "text"}}),
    (responses, "tool_choice", {"type": "function", "name": "f"}),
    (responses, "stream_options", {"include_obfuscation": False}),
    (messages, "tool_choice", {"type": "tool", "name": "f"}),
    (messages, "thinking", {"type": "disabled"}),
    (messages, "output_config", {"effort": "low"}),
    (messages, "context_management", {"edits": []}),
]


@pytest.mark.parametrize(("dialect", "name", "value"), WITHIN)
def test_within_a_parameter(dialect: Any, name: str, value: dict[str, Any]) -> None:
    body = next(body for known, body in BODIES if known is dialect)
    found, plain = read(dialect, body | {name: value | {"made_up": None}}), read(dialect, body | {name: value})
    assert found == plain
    if name != "tool_choice" or dialect is messages:
        with pytest.raises(ApiError):
            read(dialect, body | {name: value | {"made_up": 1}})


@pytest.mark.parametrize(("dialect", "body"), BODIES[:3])
def test_what_a_template_is_given(dialect: Any, body: dict[str, Any]) -> None:
    given = {"enable_thinking": None}
    assert read(dialect, body | {"chat_template_kwargs": given, "made_up": None}).variables == given


def test_what_an_agent_keeps_for_itself() -> None:
    with pytest.raises(ApiError, match="metadata"):
        read(responses, {"input": "hi", "metadata": {"a": None}})


@pytest.mark.parametrize(("dialect", "body"), BODIES[:3])
def test_within_a_tool(dialect: Any, body: dict[str, Any]) -> None:
    tool = body["tools"][0]
    more = dict.fromkeys(["strict", "cache_control", "description", "defer_loading", "made_up"])
    found = read(dialect, body | {"tools": [tool | more]})
    assert found.tools[0]["function"]["parameters"] == SCHEMA, "in a schema null is a value"
    if dialect is not chat:  # there the template is shown tools as they are
        assert found.tools == read(dialect, body).tools
