"""The form of answers and of tool calls, and their length."""

import re
from typing import Any

import pytest

from strop.errors import StropError
from strop.rewards import Verdict, has_format, soft_overlong, valid_tool_calls
from strop.runners.rewards import parse_rewards


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<answer>c</answer><think>a</think>", False),
        ("<think>a</think>", False),
        ("Well, <think>a</think><answer>c</answer>", False),
        ("<think>a</think> so <answer>c</answer>", False),
        ("<think>a</think><answer>c</answer> bye", False),
        ("<think>a<answer>c</answer></think>", False),
        ("<think>a</think><answer>c</answer><answer>d</answer>", False),
        ("<think>a</think><think>b</think><answer>c</answer>", False),
        ("<think>a<answer>c</answer>", False),
    ],
)
def test_tags_in_order(text: str, fine: bool) -> None:
    assert has_format(text, ["think", "answer"]) == fine


def test_a_pattern_is_for_the_whole_text() -> None:
    assert has_format("a\n12", r"a.\d+")
    assert not has_format("a\n12 ", r"a.\d+")
    assert not has_format("a\n12", re.compile(r"a.\d+"))  # a compiled one has its own flags


def test_soft_overlong_falls_in_a_straight_line() -> None:
    assert [soft_overlong(n, 20_480, 4096) for n in (0, 16_384, 18_432, 20_480, 10**6)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong(1, 10, 11)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
        },
    }
]


def call(id: Any = "c1", name: Any = "add", arguments: Any = '{"a": 1, "b": 2}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def answer(id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "3"}


USER, SAID = {"role": "user", "content": "?"}, {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([USER, asks(call()), answer(), SAID], ""),
        ([USER, asks(call(), call("c2")), answer("c2"), answer(), SAID], ""),
        ([USER, asks(call(arguments={"a": 1, "b": 2}))], ""),  # parsed already, and the last message
        ([USER, SAID], ""),
        ([asks(call(arguments='{"a": 1'))], "not a JSON object"),
        ([asks(call(arguments="[1, 2]"))], "not a JSON object"),
        ([asks(call(arguments=None))], "not a JSON object"),
        ([asks(call(arguments="[" * 100_000))], "not a JSON object"),
        ([asks(call(name="sub"))], "no tool sub"),
        ([asks(call(name=""))], "names no function"),
        ([asks(call(arguments='{"a": 1}'))], "without b"),
        ([asks(call(arguments='{"a": 1, "b": 2, "c": 3}'))], "with c"),
        ([asks(call(), call())], "of two calls"),
        ([asks(call(id=None))], "missing"),
        ([asks({"id": "c1"})], "not one of a function"),
        ([asks(call()), SAID], "not answered"),
        ([asks(call()), answer("c9")], "not an open call"),
        ([asks(call()), answer(), answer()], "not an open call"),
    ],
)
def test_tool_calls(messages: list[dict[str, Any]], why: str) -> None:
    verdict = valid_tool_calls(messages, TOOLS)
    assert bool(verdict) == (not why)
    assert why in verdict.why


def test_a_verdict_is_a_reward() -> None:
    assert [(reward.name, reward.value) for reward in parse_rewards(Verdict(0.5, "half"))] == [("reward", 0.5)]
    given = parse_rewards({"reward": Verdict(0.0, "wrong"), "format": True})
    assert [reward.value for reward in given] == [0.0, 1.0]


def test_no_verdict_is_no_reward() -> None:
    with pytest.raises(StropError, match="there is no verdict: nobody knows"):
        parse_rewards({"reward": Verdict(None, "nobody knows"), "format": True})
