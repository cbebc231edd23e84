"""Anthropic's own client, over a socket, against recorded turns."""

import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from strop.demo import TOOLS as CHAT_TOOLS
from strop.engines.scripted import Breaks
from strop.errors import EngineError
from strop.gateway.dialects.base import AnswerInfo, ApiError, ChoiceDone, Delta, ModelRequest, ToolCall
from strop.gateway.dialects.messages import Messages
from strop.net.server import serve
from strop.types import Attempt, Turn
from tests.integration.gateway.stand import Stand, fetch

CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "5 * 6"}}\n</tool_call>'
QUESTION: Any = [{"role": "user", "content": "What is 3 * 4? 🙂"}]
FUNCTION: Any = CHAT_TOOLS[0]["function"]
TOOLS: Any = [
    {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
]
ASK: Any = {"model": "any", "max_tokens": 100, "messages": QUESTION}

Connect = Callable[..., AsyncAnthropic]


@pytest.fixture
async def connect(stand: Stand) -> AsyncIterator[Connect]:
    """Clients with the address and the key an agent is given."""
    clients: list[AsyncAnthropic] = []

    def client(attempt: Attempt, agent: str = "main", **options: Any) -> AsyncAnthropic:
        options = {"api_key": attempt.key, "max_retries": 0} | options
        clients.append(AsyncAnthropic(base_url=stand.url(attempt, agent).removesuffix("/v1"), **options))
        return clients[-1]

    yield client
    for client_ in clients:
        await client_.close()


async def answer(client: AsyncAnthropic, *, stream: bool = False, **body: Any) -> Message:
    if not stream:
        return await client.messages.create(**ASK | body)
    async with client.messages.stream(**ASK | body) as events:
        return await events.get_final_message()


def check_appends(turns: Sequence[Turn]) -> None:
    for before, after in itertools.pairwise(turns):
        assert (after.parent, after.branch, after.shared) == (before.id, None, len(before.ids))
        assert after.prompt_ids[: after.shared] == before.ids


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop(stand: Stand, connect: Connect, stream: bool) -> None:
    stand.script(f"🙂 é {CALL}\n{OTHER}", f"{CALL}\nOr\n{OTHER}", "It is 12 < 30. 🙂\n", "bye")
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    messages = list(QUESTION)
    answers: list[Message] = []
    for number in range(4):
        message = await answer(client, stream=stream, messages=messages, tools=TOOLS, system="Be brief.")
        answers.append(message)
        messages.append(message.to_param())
        calls = [block for block in message.content if block.type == "tool_use"]
        results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{number}"} for call in calls]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        turn = (await stand.turns(attempt))[-1]
        assert message.id == turn.id
        assert message.usage.cache_read_input_tokens == turn.shared
        assert message.usage.input_tokens == len(turn.prompt_ids) - turn.shared
        assert message.usage.output_tokens == len(turn.response_ids)
    turns = await stand.turns(attempt)
    check_appends(turns)
    assert [message.stop_reason for message in answers] == ["tool_use", "tool_use", "end_turn", "end_turn"]
    assert [[block.type for block in message.content] for message in answers] == [
        ["text", "tool_use", "tool_use"],
        ["text", "tool_use", "tool_use"],
        ["text"],
        ["text"],
    ]
    assert [block.input for block in answers[0].content if block.type == "tool_use"] == [
        {"expression": "3 * 4"},
        {"expression": "5 * 6"},
    ]
    assert answers[2].content[0].text == "It is 12 < 30. 🙂\n"  # type: ignore[union-attr]
    assert [message["role"] for message in turns[1].messages] == ["system", "user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("It is 12. 🙂 é", {}),
        ("", {}),
        (CALL, {"tools": TOOLS}),
        (OTHER, {"tools": TOOLS}),
        (f"{CALL}\n{CALL}\nand\n{OTHER}", {"tools": TOOLS}),
        ("<tool_call>{nope}</tool_call>", {"tools": TOOLS}),
        ("one two three", {"stop_sequences": ["zzz", "wo"]}),
        (CALL + "stop", {"tools": TOOLS, "stop_sequences": ["stop"]}),
        ("one two three four five six", {"max_tokens": 3}),
        ("and five", {"messages": [*QUESTION, {"role": "assistant", "content": "Twelve"}]}),
    ],
)
async def test_streaming_changes_nothing_but_the_delivery(
    stand: Stand, connect: Connect, script: str, asked: Any
) -> None:
    answers: list[Any] = []
    turns: list[Turn] = []
    for stream in (False, True):
        stand.script(script)
        attempt = await stand.attempt(f"r{stream}", seed=5)
        message = await answer(connect(attempt), stream=stream, **asked)
        answers.append(message.model_dump(exclude={"id"}, exclude_none=True))
        turns += await stand.turns(attempt)
    assert answers[0] == answers[1]
    for field in ("prompt_ids", "response_ids", "logprobs", "answer", "finish", "sampling", "requested"):
        assert getattr(turns[0], field) == getattr(turns[1], field)


async def test_why_answers_end(stand: Stand, connect: Connect) -> None:
    stand.script("one two three", "one two three", "one two three", CALL)
    client = connect(await stand.attempt("r1"))
    stopped = await answer(client, stop_sequences=["zzz", "wo"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "wo", "one t")  # type: ignore[union-attr]
    cut = await answer(client, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)
    assert (await answer(client, stop_sequences=["zzz"])).stop_reason == "end_turn"
    assert (await answer(client, tools=TOOLS)).stop_reason == "tool_use"


async def test_event_order_and_durability(stand: Stand, connect: Connect) -> None:
    stand.script(CALL)
    attempt = await stand.attempt("r1")
    seen: list[str] = []
    stream = await connect(attempt).messages.create(**ASK, tools=TOOLS, stream=True)
    assert stream.response.headers["x-strop-turn"] == "r1/1/0"
    async for event in stream:
        if not seen or seen[-1] != event.type:
            seen.append(event.type)
        if event.type == "message_start":
            assert event.message.id == "r1/1/0"
            assert event.message.usage.input_tokens > 0
        if event.type == "message_delta":
            (turn,) = await stand.turns(attempt)
            assert event.usage.output_tokens == len(turn.response_ids)
            assert event.delta.stop_reason == "tool_use"
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert seen == ["message_start", *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_is_extended_exactly(stand: Stand, connect: Connect, merged: bool, stream: bool) -> None:
    stand.script(" 12, 🙂", "bye")
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    begun = [*QUESTION, {"role": "assistant", "content": "It's"}]
    message = await answer(client, stream=stream, messages=begun)
    assert message.content[0].text == " 12, 🙂"  # type: ignore[union-attr]
    more = {"role": "user", "content": "more"}
    said = {"role": "assistant", "content": "It's 12, 🙂"}
    await answer(client, messages=[*QUESTION, said, more] if merged else [*begun, message.to_param(), more])
    first, second = await stand.turns(attempt)
    assert stand.engine.calls[0].asked.prompt.endswith("assistant\nIt's")
    assert first.answer["content"] == "It's 12, 🙂"
    check_appends([first, second])


async def test_prefill_with_calls(stand: Stand, connect: Connect) -> None:
    stand.script(CALL.removeprefix("Let"), "12")
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "Let"}]}]
    message = await answer(client, messages=begun, tools=TOOLS)
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "12"}  # type: ignore[union-attr]
    follow = [*begun, message.to_param(), {"role": "user", "content": [result]}]
    await answer(client, messages=follow, tools=TOOLS)
    check_appends(await stand.turns(attempt))


async def test_count_tokens(stand: Stand, connect: Connect) -> None:
    stand.script(CALL, "12")
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    messages = list(QUESTION)
    for _ in range(2):
        asked: Any = {"model": "m", "messages": messages, "tools": TOOLS, "system": "Be brief."}
        count = await client.messages.count_tokens(**asked)
        message = await answer(client, **asked)
        assert count.input_tokens == len((await stand.turns(attempt))[-1].prompt_ids)
        messages.append(message.to_param())
        result = {"type": "tool_result", "tool_use_id": getattr(message.content[-1], "id", ""), "content": "12"}
        messages.append({"role": "user", "content": [result]})
    check_appends(await stand.turns(attempt))
    assert len(stand.engine.calls) == 2
    long: Any = [{"role": "user", "content": "ab" * 2000}]
    assert (await client.messages.count_tokens(model="m", messages=long)).input_tokens > 1000, "counting has no limit"
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": [IMAGE]}])
    assert ["'image'" in event.data["message"] for event in await stand.store.events("r1")] == [True]


async def test_models(stand: Stand, connect: Connect) -> None:
    attempt = await stand.attempt("r1")
    (model,) = [model async for model in connect(attempt).models.list()]
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 1000)
    assert int(model.created_at.timestamp()) == int(attempt.started)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await connect(attempt, api_key="x").models.list()
    assert caught.value.type == "authentication_error"


async def test_policy_settings_win(stand: Stand, connect: Connect) -> None:
    stand.script("a")
    attempt = await stand.attempt("r1")
    asked: Any = {
        "temperature": 0.3,
        "top_p": 0.5,
        "top_k": 9,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
    }
    await answer(connect(attempt), extra_body=asked | {"metadata": {"user_id": "u"}})
    (turn,) = await stand.turns(attempt)
    assert turn.requested == asked | {"model": "any", "max_tokens": 100}
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (1.0, 1.0, 100)


async def test_tool_choice(stand: Stand, connect: Connect) -> None:
    rest = OTHER.removeprefix('<tool_call>\n{"name": "calculator", "arguments": ')
    stand.script(rest, rest, OTHER.removeprefix("<tool_call>\n"), f"{CALL}\n{OTHER}", CALL)
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    two = [*TOOLS, TOOLS[0] | {"name": "other"}]
    for choice, tools in (
        ({"type": "tool", "name": "calculator"}, TOOLS),
        ({"type": "any"}, TOOLS),
        ({"type": "any"}, two),
    ):
        message = await answer(client, tools=tools, tool_choice=choice)
        assert [block.type for block in message.content] == ["tool_use"]
        assert message.content[0].input == {"expression": "5 * 6"}  # type: ignore[union-attr]
    one = await answer(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    none = await answer(client, tools=TOOLS, tool_choice={"type": "none"})
    assert (none.stop_reason, none.content[0].text) == ("end_turn", CALL)  # type: ignore[union-attr]


async def test_a_conversation_may_change_its_dialect(stand: Stand, connect: Connect) -> None:
    stand.script(CALL, "12", "bye")
    attempt = await stand.attempt("r1")
    first = await answer(connect(attempt), tools=TOOLS)
    call = first.content[1]
    assert call.type == "tool_use"
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": call.id, "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "12"},
    ]
    await stand.client(attempt).chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS)  # type: ignore[call-overload]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12"}]}
    history = [
        *QUESTION,
        first.to_param(),
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "bye"},
    ]
    await answer(connect(attempt), messages=history, tools=TOOLS)
    check_appends(await stand.turns(attempt))


# -- refusals ----------------------------------------------------------------------------------------------------------

IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
USE = {"type": "tool_use", "id": "a", "name": "calculator", "input": {}}
TEXT = {"type": "text", "text": "x"}


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


REFUSED: list[tuple[Any, str]] = [
    ({"logprobs": True}, "'logprobs'"),
    ({"seed": 1}, "'seed'"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"messages": [said("assistant", TEXT)]}, "begin with a message of role 'user'"),
    ({"container": "c"}, "'container'"),
    ({"mcp_servers": [{"name": "x"}]}, "'mcp_servers'"),
    ({"thinking": {"type": "maybe"}}, "thinking"),
    ({"thinking": {"type": "enabled", "depth": 3}}, "depth"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "'computer_20250124'"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema"),
    ({"tools": [TOOLS[0] | {"color": 1}]}, r"tools\[0\].*'color'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}, "the tools are calculator"),
    ({"tool_choice": {"type": "any"}}, "the tools are none"),
    ({"tool_choice": {"type": "all"}}, "tool_choice"),
    ({"messages": [said("user", IMAGE)]}, "'image'"),
    ({"messages": [said("user", TEXT, DOCUMENT)]}, r"content\[1\] is of type 'document'"),
    ({"messages": [said("user", {"type": "search_result"})]}, "'search_result'"),
    ({"messages": [said("user", {"type": "container_upload"})]}, "'container_upload'"),
    ({"messages": [said("user", {"type": "thinking", "thinking": "x", "signature": ""})]}, "'thinking'"),
    ({"messages": [said("user", USE)]}, "'tool_use'"),
    ({"messages": [said("user", {"type": ["text"]})]}, "type"),
    ({"messages": [*QUESTION, said("assistant", {"type": "server_tool_use"})]}, "'server_tool_use'"),
    ({"messages": [*QUESTION, said("assistant", {"type": "web_search_tool_result"})]}, "'web_search_tool_result'"),
    ({"messages": [*QUESTION, said("assistant", IMAGE)]}, "'image'"),
    ({"messages": [said("user", {"type": "text"})]}, "text"),
    ({"system": [IMAGE]}, r"system\[0\] is of type 'image'"),
    ({"messages": [said("user", {"type": "tool_result", "tool_use_id": "zz"})]}, "'zz'"),
    (
        {
            "messages": [
                *QUESTION,
                said("assistant", USE),
                said("user", {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
            ]
        },
        "tool_result 'a'.*'image'",
    ),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "It is "}]}, "white space"),
    ({"messages": [*QUESTION, said("assistant", TEXT, USE)]}, "only text"),
    ({"messages": [*QUESTION, said("assistant", TEXT)], "tools": TOOLS, "tool_choice": {"type": "any"}}, "auto"),
]


async def test_refusals_name_what_is_refused(stand: Stand, connect: Connect) -> None:
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    messages: list[str] = []
    for body, words in REFUSED:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**ASK, extra_body=body)
        assert caught.value.type == "invalid_request_error"
        assert re.search(words, caught.value.api_message or ""), (body, caught.value.api_message)
        messages.append(caught.value.api_message or "")
    events = await stand.store.events("r1")
    assert [event.data["message"] for event in events] == messages
    assert all(event.kind == "error" and event.data["param"] for event in events)
    assert stand.engine.calls == []


async def test_overflow(stand: Stand, connect: Connect) -> None:
    attempt = await stand.attempt("r1")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long.*1000 tokens") as caught:
        await answer(connect(attempt), messages=[{"role": "user", "content": "ab" * 2000}])
    assert caught.value.type == "invalid_request_error"
    (event,) = await stand.store.events("r1")
    assert event.data["code"] == "context_length_exceeded"


async def test_errors_have_their_types(stand: Stand, connect: Connect) -> None:
    stand.script("a", "b")
    one, two = await stand.attempt("r1"), await stand.attempt("r2")
    assert (await answer(connect(one, api_key=None, auth_token=one.key))).stop_reason == "end_turn"
    with pytest.raises(anthropic.AuthenticationError) as unauthorized:
        await answer(connect(one, api_key=two.key))
    assert unauthorized.value.type == "authentication_error"
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as lost:
        await connect(one).messages.batches.list()
    assert lost.value.type == "not_found_error"
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        await answer(connect(one), system="x" * (17 << 20))
    assert large.value.type == "request_too_large"
    status, body = await fetch(f"{stand.url(one)}/messages", b"{", key=one.key)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    await stand.store.finish("r1", 1)
    with pytest.raises(anthropic.ConflictError, match=r"over|ended"):
        await answer(connect(one, max_retries=2))
    assert len(stand.engine.calls) == 2, "not retried"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failures(stand: Stand, connect: Connect, stream: bool) -> None:
    stand.script(EngineError("out of order"), Breaks("one two"), "fine")
    attempt = await stand.attempt("r1")
    client = connect(attempt)
    with pytest.raises(anthropic.InternalServerError, match="out of order") as caught:
        await answer(client, stream=stream)
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
    with pytest.raises(anthropic.APIStatusError, match="broke off") as caught:
        await answer(client, stream=stream)
    assert (caught.value.status_code, caught.value.type) == (200 if stream else 503, "overloaded_error")
    assert (await answer(client, stream=stream)).content[0].text == "fine"  # type: ignore[union-attr]
    turns = await stand.store.turns("r1")
    assert [turn.finish for turn in turns] == ["error", "error", "stop"]
    assert turns[1].response_ids == stand.engine.calls[1].ids
    assert [event.data["code"] for event in await stand.store.events("r1")] == ["engine_error"] * 2


# -- what a request means ----------------------------------------------------------------------------------------------


def read(*messages: Any, **fields: Any) -> ModelRequest:
    return Messages().read(json.dumps(ASK | {"messages": messages} | fields).encode())


def test_messages_in_their_plain_form() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    request = read(
        said("user", TEXT | mark, TEXT),
        {"role": "user", "content": "y"},
        said(
            "assistant",
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "zzz"},
            {"type": "text", "text": "a ", "citations": None},
            {"type": "text", "text": "b"},
            USE | mark | {"caller": {"type": "direct"}},
        ),
        said("assistant", USE | {"id": "b", "input": {"n": 1}}),
        said("user", {"type": "tool_result", "tool_use_id": "a", "content": [TEXT | mark, TEXT]} | mark),
        said("user", TEXT, {"type": "tool_result", "tool_use_id": "b"}),
        {"role": "system", "content": "quick"},
        system=[TEXT | mark, TEXT],
        tools=[TOOLS[0] | mark | {"type": "custom", "defer_loading": False}],
        **mark,
    )
    calls = [
        {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": {}}},
        {"id": "b", "type": "function", "function": {"name": "calculator", "arguments": {"n": 1}}},
    ]
    assert request.messages == [
        {"role": "system", "content": "x\nx"},
        {"role": "user", "content": "x\nx\ny"},
        {"role": "assistant", "content": "a b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "x\nx"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "quick"},
    ]
    assert request.tools == CHAT_TOOLS
    assert request.prefill == ""


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("division by zero", "Error: division by zero"),
        ("error: no", "error: no"),
        ([TEXT], "Error: x"),
        (None, "Error"),
    ],
)
def test_errors_of_tools_are_seen(content: Any, seen: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    request = read(*QUESTION, said("assistant", USE), said("user", result))
    assert request.messages[-1] == {"role": "tool", "tool_call_id": "a", "content": seen}


def test_an_empty_prefill_is_none() -> None:
    assert read(*QUESTION, {"role": "assistant", "content": ""}).prefill == ""
    assert read(*QUESTION, said("assistant")).messages == QUESTION
    assert read(*QUESTION, said("assistant", TEXT), said("assistant", TEXT)).prefill == "xx"


# -- thinking ----------------------------------------------------------------------------------------------------------

DONE = ChoiceDone(
    choice=0,
    reasoning="3 * 4, well",
    text="Let me see.",
    calls=(ToolCall(0, "a", "calculator", {"expression": "3 * 4"}),),
    finish="tool_calls",
)
ANSWER = AnswerInfo(id="r/1/0", model="tiny", created=0, prompt_tokens=9, cached_tokens=4, response_tokens=8,
                reasoning_tokens=5)  # fmt: skip
DELTAS = [
    Delta(reasoning="3 * 4,"),
    Delta(reasoning=" well", text="Let"),
    Delta(text=" me see."),
    Delta(calls=DONE.calls),
]


async def _thinker(scope: Any, receive: Any, send: Any) -> None:
    """Answers every request with the same thoughts, as a gateway would."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message.get("more_body"):
            break
    request, sent = Messages().read(body), "application/json"
    if request.stream:
        sent, events = "text/event-stream", Messages().stream(request)
        middle = b"".join(events.delta(ANSWER, delta) for delta in DELTAS)
        data = events.opening(ANSWER) + middle + events.closing(ANSWER, [DONE])
    else:
        data = Messages().write(ANSWER, [DONE], request)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", sent.encode())]})
    await send({"type": "http.response.body", "body": data})


async def test_thinking_reaches_the_client_and_comes_back() -> None:
    server = await serve(_thinker)
    async with AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        answers = [await answer(client, stream=stream, tools=TOOLS) for stream in (False, True)]
    await server.close()
    whole, streamed = [message.model_dump(exclude_none=True) for message in answers]
    assert whole == streamed
    assert whole["content"][0] == {"type": "thinking", "thinking": "3 * 4, well", "signature": "r/1/0"}
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    usage = answers[0].usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 8)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 5
    result = said("user", {"type": "tool_result", "tool_use_id": "a", "content": "12"})
    request = read(*QUESTION, {"role": "assistant", "content": whole["content"]}, result)
    assert request.messages[1]["reasoning_content"] == "3 * 4, well"
    assert request.messages[1]["content"] == "Let me see."


def test_thinking_once_more_is_a_block_of_its_own() -> None:
    events = Messages().stream(ModelRequest())
    data = events.opening(ANSWER) + b"".join(
        events.delta(ANSWER, delta) for delta in (Delta(reasoning="a"), Delta(text="b"), Delta(reasoning="c"))
    )
    data += events.error(ApiError("broke", status=503))
    names = [line[7:] for line in data.decode().splitlines() if line.startswith("event: ")]
    thinking = ["content_block_start", "content_block_delta"]
    assert names == [
        "message_start",
        "ping",
        *thinking,
        "content_block_delta",  # the signature
        "content_block_stop",
        *thinking,
        "content_block_stop",
        *thinking,
        "error",
    ]
    bodies = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    assert [body["type"] for body in bodies] == names
    assert bodies[-1]["error"] == {"type": "overloaded_error", "message": "broke"}
    assert [body["index"] for body in bodies if body["type"] == "content_block_start"] == [0, 1, 2]
