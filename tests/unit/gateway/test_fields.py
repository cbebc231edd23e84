"""Lists of tools that come again with every request are read once, and read no other way for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strop.gateway.conversation import Conversation
from strop.gateway.dialects import fields
from strop.gateway.dialects.base import ApiError
from strop.gateway.dialects.chat import ChatCompletions
from strop.gateway.dialects.fields import SharedTables, find_facts

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def read(**more: Any) -> Any:
    return ChatCompletions().read(json.dumps(ASK | more).encode())


def test_the_same_bytes_are_the_same_list() -> None:
    one, again, other = read(tools=[TOOL]), read(tools=[TOOL]), read(tools=[TOOL, TOOL])
    assert one.tools is again.tools
    assert one.tools == [TOOL]
    assert other.tools == [TOOL, TOOL]
    assert read(tools=[]).tools == []


def test_another_list_is_another_context() -> None:
    """As it is with lists that nobody remembers."""
    messages = ASK["messages"]
    shared = [Conversation.of(messages, read(tools=tools).tools).start for tools in ([TOOL], [TOOL], [TOOL, TOOL])]
    assert shared == [Conversation.of(messages, tools).start for tools in ([TOOL], [TOOL], [TOOL, TOOL])]
    assert shared[0] == shared[1] != shared[2]
    with_variables = Conversation.of(messages, read(tools=[TOOL]).tools, variables={"enable_thinking": False}).start
    assert with_variables == Conversation.of(messages, [TOOL], variables={"enable_thinking": False}).start != shared[0]


@pytest.mark.parametrize("tools", [["now"], [None], [TOOL, 7], [{"type": "function"}], [TOOL, {"type": "other"}], {}])
def test_what_is_wrong_is_told_each_time(tools: Any) -> None:
    told: list[tuple[str, str | None]] = []
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            read(tools=tools)
        told.append((refused.value.message, refused.value.param))
    assert told[0] == told[1]
    assert (told[0][1] or "").startswith("tools")


def test_no_more_than_so_much_is_remembered() -> None:
    tables = SharedTables()
    lists = [tables.read((json.dumps({"number": number}).encode(),)) for number in range(fields.MAX_TABLES + 1)]
    assert tables.facts(lists[0]) is None
    assert tables.facts(lists[-1]) == {}
    long = tables.read((json.dumps({"text": "a" * fields.MAX_BYTES}).encode(),))
    assert tables.facts(long) is None
    assert find_facts([TOOL]) is None
