"""OpenAI's own client and its responses, over a socket, against recorded turns."""

import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from openai.types.responses import Response

from strop.demo import TOOLS as CHAT_TOOLS
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from strop.types import Turn
from tests import chatml
from tests.integration.gateway.stand import Stand

CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
BARE = CALL.partition("\n")[2]
QUESTION = "What is 3 * 4? 🙂"
TOOLS: Any = [{"type": "function", "strict": True} | tool["function"] for tool in CHAT_TOOLS]  # type: ignore[operator]


def check_appends(turns: list[Turn]) -> None:
    for before, after in itertools.pairwise(turns):
        assert (after.parent, after.branch) == (before.id, None)
        assert after.shared == len(before.ids)
        assert after.prompt_ids[: after.shared] == before.ids


def results(response: Any) -> list[Any]:
    """What an agent sends back for the calls of a response."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12"}
        for item in response.output
        if item.type == "function_call"
    ]


async def ask(client: openai.AsyncOpenAI, stream: bool = False, **request: Any) -> Response:
    """One response; where it is streamed, the one the client's helper put together."""
    if not stream:
        return await client.responses.create(model="any", **request)
    async with client.responses.stream(model="any", **request) as events:
        return await events.get_final_response()


async def test_answer(stand: Stand, renderer: Renderer) -> None:
    stand.script(CALL)
    attempt = await stand.attempt("r1")
    response = await ask(
        stand.client(attempt), input=QUESTION, tools=TOOLS, instructions="Be brief.", metadata={"a": "b"}
    )
    (turn,) = await stand.turns(attempt)
    assert Response.model_validate(response.model_dump(mode="json"), strict=False).id == turn.id == "r1/1/0"
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert (response.error, response.incomplete_details, response.previous_response_id) == (None, None, None)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert [tool.to_dict() for tool in response.tools] == TOOLS
    assert response.output_text == "Let me see."
    message, call = response.output
    assert message.to_dict() == {
        "id": "msg_r1/1/0", "type": "message", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    assert (call.type, call.name, call.status) == ("function_call", "calculator", "completed")
    assert json.loads(call.arguments) == {"expression": "3 * 4"}
    assert call.call_id == turn.answer["tool_calls"][0]["id"] != call.id
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(turn.prompt_ids), len(turn.response_ids))
    assert usage.total_tokens == len(turn.ids)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert turn.messages == chat
    shown = [{"type": "function", "function": tool["function"]} for tool in CHAT_TOOLS]
    assert turn.prompt_ids == renderer.prompt(chat, shown), "the prompt is the chat API's"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remembered", [False, True])
async def test_tool_conversation(stand: Stand, remembered: bool, stream: bool) -> None:
    """The agent sends everything back, or lets the gateway remember; either way every turn extends the one before."""
    stand.script(f"{CALL}\n{CALL}", BARE, "It is 12. 🙂", "Bye.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    request: Any = {"tools": TOOLS, "instructions": "Be brief."}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    response = await ask(client, stream, input=items, **request)
    kinds = [[item.type for item in response.output]]
    for _ in range(3):
        new = results(response) or [{"role": "user", "content": "more"}]
        items += [*response.output, *new]
        more = {"input": new, "previous_response_id": response.id} if remembered else {"input": items}
        response = await ask(client, stream, **more, **request)
        kinds.append([item.type for item in response.output])
    assert kinds == [["message", "function_call", "function_call"], ["function_call"], ["message"], ["message"]]
    assert response.output_text == "Bye."
    turns = await stand.turns(attempt)
    check_appends(turns)
    assert [message["role"] for message in turns[3].messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == len(turns[2].ids)
    assert len({item.id for item in items if not isinstance(item, dict)}) == 5


async def test_results_between_calls(stand: Stand) -> None:
    """Some agents put every result right behind its call; that the calls are one answer's is in their ids."""
    stand.script(f"{BARE}\n{BARE}", "It is 12.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    first = await ask(client, input=QUESTION, tools=TOOLS)
    (call, other), (result, another) = first.output, results(first)
    items: Any = [{"role": "user", "content": QUESTION}, call, result, other, another]
    await ask(client, input=items, tools=TOOLS)
    check_appends(await stand.turns(attempt))


async def test_agents_that_drop_ids(stand: Stand) -> None:
    stand.script(CALL, "It is 12.", "Bye.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        response = await ask(client, input=items, tools=TOOLS)
        items += [item.model_dump(exclude={"id", "status"}, exclude_none=True) for item in response.output]
        items += results(response) or [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    check_appends(await stand.turns(attempt))


def refer(item: Any) -> Any:
    """An item of an answer, named and not sent."""
    return item if isinstance(item, dict) else {"type": "item_reference", "id": item.id}


@pytest.mark.parametrize("named", [("message",), ("function_call",), ("message", "function_call")])
async def test_items_may_be_named(stand: Stand, named: tuple[str, ...]) -> None:
    """As the AI SDK sends them: what the turn has said stands in their place, and every turn extends the one before."""
    stand.script(f"{CALL}\n{CALL}", BARE, "It is 12.", "Bye.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(4):
        response = await ask(client, input=items, tools=TOOLS)
        items += [refer(item) if item.type in named else item for item in response.output]
        items += results(response) or [{"role": "user", "content": "more"}]
    assert response.output_text == "Bye."
    check_appends(await stand.turns(attempt))


async def test_an_item_that_is_left_out_is_not_named(stand: Stand) -> None:
    """Naming one item of an answer does not bring the others back."""
    stand.script(CALL, "fine")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    first = await ask(client, input=QUESTION, tools=TOOLS)
    asked: Any = [{"role": "user", "content": QUESTION}, refer(first.output[0]), {"role": "user", "content": "more"}]
    await ask(client, input=asked, tools=TOOLS)
    _, second = await stand.turns(attempt)
    assert second.branch == "edited_history"
    assert second.messages[1] == {"role": "assistant", "content": "Let me see.", "turn": "r1/1/0"}


async def test_an_item_of_another_conversation_is_not_found(stand: Stand) -> None:
    stand.script("fine")
    attempt = await stand.attempt("r1")
    asked: Any = [{"type": "item_reference", "id": "msg_r1/1/77"}, {"role": "user", "content": "more"}]
    with pytest.raises(openai.NotFoundError, match="no previous response 'r1/1/77'"):
        await ask(stand.client(attempt), input=asked)
    assert stand.engine.calls == []


async def test_a_call_that_there_is_not_is_not_found(stand: Stand) -> None:
    stand.script(CALL)
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    await ask(client, input=QUESTION, tools=TOOLS)
    asked: Any = [{"role": "user", "content": QUESTION}, {"type": "item_reference", "id": "fc1_r1/1/0"}]
    with pytest.raises(openai.NotFoundError, match=r"'fc1_r1/1/0' is not an item of .* 1 calls\. Fix: send the item"):
        await ask(client, input=asked, tools=TOOLS)
    assert len(stand.engine.calls) == 1


async def test_what_this_gateway_heard_is_not_read_again(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names items is answered from its session; only one that another gateway made is looked up."""
    stand.script(CALL, "It is 12.", "Bye.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    read: list[str] = []
    turns = stand.store.turns

    async def read_turns(rollout: str, *, attempt: int | None = None) -> list[Turn]:
        read.append(rollout)
        return await turns(rollout, attempt=attempt)

    for number in range(3):
        response = await ask(client, input=items, tools=TOOLS)
        items += [refer(item) for item in response.output]
        items += results(response) or [{"role": "user", "content": "more"}]
        if number == 0:  # its session began
            monkeypatch.setattr(stand.store, "turns", read_turns)
    assert read == []
    stand.gateway.forget("r1")  # as after a restart
    stand.script("Again.")
    await ask(client, input=items, tools=TOOLS)
    assert read == ["r1"], "by the session, once"
    check_appends(await turns("r1"))


async def test_a_turn_without_messages_is_in_nobodys_way(stand: Stand) -> None:
    """As one of an outside model is whose request was not understood."""
    stand.script("fine", "Bye.")
    attempt = await stand.attempt("r1")
    empty = Turn(
        id="r1/1/0", rollout="r1", attempt=1, prompt_ids=[], response_ids=[], logprobs=[], versions=[], finish="stop",
        started=0.0, ended=0.0,
    )  # fmt: skip
    await stand.store.add_turns([empty])
    client = stand.client(attempt)
    first = await ask(client, input="one")
    second = await ask(client, input="two", previous_response_id=first.id)
    assert second.output_text == "Bye."
    with pytest.raises(openai.NotFoundError, match="no previous response 'r1/1/0'"):
        await ask(client, input="two", previous_response_id="r1/1/0")


async def test_instructions_are_for_one_response(stand: Stand) -> None:
    stand.script("a", "b", "c")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    first = await ask(client, input="one", instructions="Be brief.")
    second = await ask(client, input="two", previous_response_id=first.id)
    third = await ask(client, input="three", previous_response_id=second.id, instructions="Be long.")
    turns = await stand.turns(attempt)
    assert [[message["content"] for message in turn.messages] for turn in turns] == [
        ["Be brief.", "one"],
        ["one", "a", "two"],
        ["Be long.", "one", "a", "two", "b", "three"],
    ]
    assert third.previous_response_id == second.id
    stand.gateway.forget("r1")  # as after a restart
    stand.script("d")
    await ask(client, input="four", previous_response_id=third.id, instructions="Be long.")
    check_appends((await stand.store.turns("r1"))[2:])


async def events_of(client: openai.AsyncOpenAI, **request: Any) -> list[Any]:
    stream = await client.responses.create(model="any", stream=True, **request)
    return [event async for event in stream]


async def test_events(stand: Stand) -> None:
    stand.script(f"🙂 é {CALL}")
    attempt = await stand.attempt("r1")
    events = await events_of(stand.client(attempt), input=QUESTION, tools=TOOLS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind for kind, _ in itertools.groupby(event.type.removeprefix("response.") for event in events)]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == "🙂 é Let me see."
    final = events[-1].response
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    assert [(item.id, item.status) for item in added] == [(item.id, "in_progress") for item in final.output]
    (arguments,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments.arguments == final.output[1].arguments
    assert (arguments.item_id, arguments.output_index) == (final.output[1].id, 1)


async def test_event_lines(stand: Stand) -> None:
    """Events carry their names beside the data, for clients that go by those."""
    stand.script("ok")
    attempt = await stand.attempt("r1")
    async with stand.client(attempt).responses.with_streaming_response.create(
        model="m", input=QUESTION, stream=True
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["x-strop-turn"] == "r1/1/0"
        text = (await raw.read()).decode()
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "[DONE]" not in text


ANSWERS = {
    "text": ["It is 12. 🙂"],
    "calls": [f"{BARE}\nand {CALL}"],  # text behind the first call
    "one call": [BARE],
    "nothing": [""],
    "malformed": ["<tool_call>{nope}</tool_call>"],
    "cut off": ["What is 3 * 4? It is 12. " * 60],
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_streaming_changes_nothing(stand: Stand, name: str) -> None:
    """The response at the end is the one that is given without streaming; the turns are the same too."""
    found: list[Any] = []
    turns: list[Turn] = []
    request: Any = {"input": QUESTION, "tools": TOOLS, "include": ["message.output_text.logprobs"]}
    for stream in (False, True):
        stand.script(*ANSWERS[name])
        attempt = await stand.attempt(f"r{int(stream)}", seed=5)
        client = stand.client(attempt)
        if stream:
            events = await events_of(client, **request)
            assert events[-1].type == f"response.{events[-1].response.status}"
            found.append(events[-1].response)
            told = [event for event in events if event.type == "response.output_text.delta"]
            assert "".join(event.delta for event in told) == events[-1].response.output_text
            parts = [item.content[0] for item in events[-1].response.output if item.type == "message"]
            assert sum(len(event.logprobs) for event in told) == sum(len(part.logprobs) for part in parts)
        else:
            found.append(await ask(client, **request))
        turns += await stand.turns(attempt)
    plain, streamed = (response.to_dict() for response in found)
    assert json.dumps(plain | {"created_at": 0}).replace("r0/1/0", "r1/1/0") == json.dumps(streamed | {"created_at": 0})
    for field in ("prompt_ids", "response_ids", "logprobs", "answer", "finish", "sampling", "requested"):
        assert getattr(turns[0], field) == getattr(turns[1], field)
    message = next((item for item in found[0].output if item.type == "message"), None)
    if message is not None:
        assert [token.logprob for token in message.content[0].logprobs] == turns[0].logprobs


async def test_helper_accumulates_every_event(stand: Stand) -> None:
    stand.script(f"{CALL}\n{CALL}")
    attempt = await stand.attempt("r1")
    text, arguments = "", {}
    async with stand.client(attempt).responses.stream(model="m", input=QUESTION, tools=TOOLS) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
            elif event.type == "response.function_call_arguments.delta":
                arguments[event.output_index] = event.snapshot
        final = await stream.get_final_response()
    assert final.output_text == text == "Let me see.\nLet me see."
    assert arguments == {i: item.arguments for i, item in enumerate(final.output) if item.type == "function_call"}
    assert len(arguments) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remembered", [False, True])
async def test_reasoning(stand: Stand, tmp_path: Path, remembered: bool, stream: bool) -> None:
    """Reasoning is an item of its own, and stays where it was said, though this template never writes it."""
    thinking = Renderer.from_parts(chatml.make(tmp_path / "model"), chatml.TEMPLATE + "{# <think></think> #}")
    stand.gateway.routes = Routes({"*": replace(stand.gateway.routes.agents["*"], renderer=thinking)})
    stand.script(f"<think>I compute. 🙂</think>{CALL}", "<think>Well.</think>It is 12.", "Bye.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    new, kinds, previous = items, [], {}
    for _ in range(3):
        response = await ask(client, stream, input=new if remembered else items, tools=TOOLS, **previous)
        kinds.append([item.type for item in response.output])
        if kinds == [["reasoning", "message", "function_call"]]:
            (part,) = response.output[0].content
            assert (part.type, part.text, response.output[0].summary) == ("reasoning_text", "I compute. 🙂", [])
            assert response.usage.output_tokens_details.reasoning_tokens > 0
        new = results(response) or [{"role": "user", "content": "more"}]
        items = [*items, *response.output, *new]
        previous = {"previous_response_id": response.id} if remembered else {}
    assert kinds == [["reasoning", "message", "function_call"], ["reasoning", "message"], ["message"]]
    turns = await stand.turns(attempt)
    check_appends(turns)
    assert turns[2].messages[1]["reasoning_content"] == "I compute. 🙂"


async def test_length(stand: Stand) -> None:
    stand.script("one two three four five", "more")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    response = await ask(client, input=QUESTION, max_output_tokens=3, temperature=0.5, top_p=0.9)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert (response.max_output_tokens, response.temperature, response.top_p) == (3, 0.5, 0.9)
    await ask(client, input="go on", previous_response_id=response.id)
    turns = await stand.turns(attempt)
    check_appends(turns)
    assert turns[0].finish == "length"
    assert turns[0].requested == {"model": "any", "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.9}
    assert (turns[0].sampling.temperature, turns[0].sampling.max_tokens) == (1.0, 3)


async def test_tool_choice(stand: Stand) -> None:
    stand.script('{"expression": "3 * 4"}}\n</tool_call>', f"{CALL}\n{CALL}", CALL)
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    forced = await ask(client, input=QUESTION, tools=TOOLS, tool_choice={"type": "function", "name": "calculator"})
    assert [item.type for item in forced.output] == ["function_call"]
    await ask(client, input=results(forced), tools=TOOLS, previous_response_id=forced.id, parallel_tool_calls=False)
    single = (await stand.store.turns("r1"))[1]
    assert len(single.answer["tool_calls"]) == 1
    none = await ask(client, input="again", tools=TOOLS, tool_choice="none")
    assert none.output_text == CALL
    turns = await stand.store.turns("r1")
    assert turns[1].parent == turns[0].id
    assert turns[1].prompt_ids[: turns[1].shared] == turns[0].ids


async def test_items_of_every_kind(stand: Stand) -> None:
    """A conversation that began elsewhere, with whatever its maker left in the items."""
    stand.script("ok")
    attempt = await stand.attempt("r1")
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_2", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
        {"type": "function_call", "id": "fc_3", "call_id": "c1", "name": "calculator",
         "arguments": '{"expression": "1"}'},
        {"type": "function_call", "call_id": "c2", "name": "calculator", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        {"type": "function_call", "call_id": "c3", "name": "calculator", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": "3"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "There."},
        {"role": "system", "content": "Go on."},
    ]  # fmt: skip
    await ask(
        stand.client(attempt), input=items, tools=TOOLS, store=False, user="u", truncation="disabled",
        service_tier="auto", include=["reasoning.encrypted_content"], text={"format": {"type": "text"}},
        reasoning={"effort": "none", "summary": "auto"}, prompt_cache_key="k",
    )  # fmt: skip

    def call(id: str, **arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "calculator", "arguments": arguments}}

    (turn,) = await stand.turns(attempt)
    assert turn.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "hm",
            "tool_calls": [call("c1", expression="1"), call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": "3"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "There."},
        {"role": "system", "content": "Go on."},
    ]
    assert turn.requested["reasoning"] == {"effort": "none", "summary": "auto"}


async def test_counting(stand: Stand) -> None:
    stand.script("a", "b")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    request: Any = {"input": QUESTION, "instructions": "Be brief.", "tools": TOOLS}
    count = await client.responses.input_tokens.count(model="m", **request)
    assert await stand.store.turns("r1") == []
    response = await ask(client, **request)
    assert response.usage is not None
    assert (count.object, count.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
    more: Any = {"input": "more", "previous_response_id": response.id, "instructions": "Be brief.", "tools": TOOLS}
    count = await client.responses.input_tokens.count(model="m", **more)
    after = await ask(client, **more)
    assert after.usage is not None
    assert count.input_tokens == after.usage.input_tokens
    check_appends(await stand.turns(attempt))
