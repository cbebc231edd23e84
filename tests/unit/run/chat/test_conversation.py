"""A conversation through the real gateway, with a model whose answers are known."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from strop import demo
from strop.agent.tool import Tool
from strop.agent.toolbox import Tools
from strop.engines.scripted import Breaks, Hangs
from strop.errors import ConfigError, ContextOverflow, EngineError
from strop.run.chat import Chat, TextDelta, ToolCallDone, ToolCallStarted
from strop.run.chat.agent import AgentChat, find_text_field, select_new_messages
from strop.types import Task, Turn
from tests.unit.run.chat.stand import call, scripted

TOOLS = Tools([Tool(demo.calculator)])


async def test_calls_are_run_until_none_is_left_and_every_turn_is_exact(tmp_path: Path):
    script = [call(expression="12 + 30"), call(expresion="42 * 2"), "That is 42.", "You are welcome."]
    heard: list = []
    async with scripted(tmp_path, script) as session:
        chat = Chat(session, tools=TOOLS.schemas, run=TOOLS.text, system="Be brief.")
        answer = await chat.ask("What is 12 + 30?", heard.append)
        assert (answer.text, answer.open, answer.branches) == ("That is 42.", False, [])
        assert [turn.finish for turn in answer.turns] == ["tool_calls", "tool_calls", "stop"]
        assert answer.calls[0] == ToolCallDone("calculator", '{"expression":"12 + 30"}', "42")
        assert answer.calls[1].result.startswith("error: the arguments of calculator do not fit")  # and it went on
        assert [type(what) for what in heard[:4]] == [ToolCallStarted, ToolCallDone, ToolCallStarted, ToolCallDone]
        assert "".join(what.text for what in heard if isinstance(what, TextDelta)) == "That is 42."
        assert len(heard) > 5  # token by token
        more = await chat.ask("Thanks!", heard.append)
        turns = await session.store.turns(answer.rollout)
        assert turns == answer.turns + more.turns
        for before, turn in pairwise(turns):
            assert (turn.parent, turn.branch) == (before.id, None)
            assert turn.prompt_ids[: turn.shared] == before.ids
        assert turns[0].messages[0] == {"role": "system", "content": "Be brief."}
        await chat.reset()
        assert (await session.store.get(answer.rollout)).status == "succeeded"


async def test_rounds_end(tmp_path: Path):
    async with scripted(tmp_path, {"": call(expression="1 + 1"), "enough": "Yes."}) as session:
        chat = Chat(session, tools=TOOLS.schemas, run=TOOLS.text, rounds=3)
        answer = await chat.ask("Go on for ever.", lambda _: None)
        assert (len(answer.turns), len(answer.calls), answer.open) == (3, 3, True)
        assert (await chat.ask("enough", lambda _: None)).branches == []  # the calls' results are part of it
        await chat.reset()


async def test_a_context_that_is_full_is_said_and_reset_helps(tmp_path: Path):
    async with scripted(tmp_path, {"": "Yes."}, context=40) as session:
        chat = Chat(session)
        first = await chat.ask("Is it?", lambda _: None)
        with pytest.raises(ContextOverflow, match=r"context of 40 tokens any more\. Fix: /reset begins another"):
            await chat.ask("Is it? " * 9, lambda _: None)
        again = await chat.ask("Is it?", lambda _: None)  # what did not fit is not part of it
        assert again.turns[0].parent == first.turns[0].id
        await chat.reset()
        fresh = await chat.ask("Is it?", lambda _: None)
        assert (fresh.turns[0].parent, fresh.rollout != first.rollout) == (None, True)
        await chat.reset()


async def test_an_answer_that_is_stopped_or_fails_is_recorded_but_no_part_of_the_conversation(tmp_path: Path):
    script = ["One.", Hangs("Two and"), Breaks("Three and", EngineError("out of memory")), "Four."]
    async with scripted(tmp_path, script) as session:
        chat = Chat(session)
        await chat.ask("one?", lambda _: None)
        before = list(chat.messages)
        begun = asyncio.Event()
        asking = asyncio.create_task(chat.ask("two?", lambda _: begun.set()))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        with pytest.raises(EngineError, match="the model gave no answer: out of memory"):
            await chat.ask("three?", lambda _: None)
        assert chat.messages == before
        four = await chat.ask("four?", lambda _: None)
        turns = await session.store.turns(four.rollout)
        assert [turn.finish for turn in turns] == ["stop", "abandoned", "error", "stop"]
        assert turns[3].parent == turns[0].id
        assert four.branches  # two others went on from there before: said, not hidden
        assert turns[3].shared == len(turns[0].ids)
        await chat.reset()


def test_where_the_text_of_a_task_goes():
    assert find_text_field({"id": 3, "prompt": "a", "note": "b"}) == "prompt"
    for unclear in ({"left": "a", "right": "b"}, {"numbers": [1, 2], "answer": "3"}):
        with pytest.raises(ConfigError, match="no field that is clearly it"):
            find_text_field(unclear)


def test_what_is_typed_takes_the_place_of_the_last_message():
    before = [{"role": "system", "content": "Be brief."}]
    example = Task(id="t", data={"messages": [*before, {"role": "user", "content": "3 * 4?"}], "answer": "12"})
    assert AgentChat(cast("Any", None), example)._data("5 * 6?") == {
        "messages": [*before, {"role": "user", "content": "5 * 6?"}],
        "answer": "12",
    }


def test_messages_are_shown_once():
    def turn(id: str, messages: list[str], parent: str | None = None, branch: str | None = None) -> Turn:
        shown = [{"role": "user", "content": text} for text in messages]
        empty = {"rollout": "r", "attempt": 1, "response_ids": [], "logprobs": [], "versions": [], "finish": "stop"}
        times = {"started": 0.0, "ended": 0.0, "prompt_ids": [1]}
        return Turn(id=id, messages=shown, parent=parent, branch=branch, **empty, **times)

    first = turn("a", ["x"])
    assert [m["content"] for m in select_new_messages(first, {})] == ["x"]
    second = turn("b", ["x", "said", "y"], parent="a")
    assert [m["content"] for m in select_new_messages(second, {"a": first})] == ["y"]
    branched = turn("c", ["z", "said", "y"], parent="a", branch="edited_history")
    assert [m["content"] for m in select_new_messages(branched, {"a": first})] == ["z", "said", "y"]
