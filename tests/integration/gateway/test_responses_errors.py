"""What the responses API refuses, and how it fails: in OpenAI's shape, with a sentence, and recorded."""

from typing import Any

import openai
import pytest

from strop.demo import TOOLS as CHAT_TOOLS
from strop.engines.scripted import Breaks
from strop.errors import EngineError
from tests.integration.gateway.stand import Stand, fetch

QUESTION = "What is 3 * 4? 🙂"
TOOLS: Any = [{"type": "function"} | tool["function"] for tool in CHAT_TOOLS]  # type: ignore[operator]
USER = {"role": "user", "content": "hi"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": ""}


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "Fix: send the item"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type", "web_search_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "text only"),
        ({"input": [{"role": "wizard", "content": ""}]}, "input[0]", "wizard"),
        ({"input": [USER, RESULT]}, "input", "no function_call before"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type", "'local_shell' is not served"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", '"name": ...'),
        ({"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0]", "async"),
        ({"tool_choice": "required"}, "tool_choice", "the tools are none"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "calculator"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "tool_choice cannot"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "cannot hold answers"),
        ({"reasoning": {"depth": "high"}}, "reasoning.depth", "not served"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"background": True}, "background", "only false"),
        ({"conversation": "c"}, "conversation", "not served"),
        ({"prompt": {"id": "p"}}, "prompt", "not served"),
        ({"top_logprobs": 3}, "top_logprobs", "only 0"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"messages": []}, "messages", "not served"),
    ],
)
async def test_refusals(stand: Stand, change: dict[str, Any], param: str, sentence: str) -> None:
    attempt = await stand.attempt("r1")
    status, answer = await fetch(
        f"{stand.url(attempt)}/responses", {"model": "m", "input": "hi"} | change, key=attempt.key
    )
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)
    assert sentence in answer["error"]["message"]
    (event,) = await stand.store.events("r1")
    assert (event.kind, event.data["param"]) == ("error", param)
    assert await stand.store.turns("r1") == []


async def test_previous_responses_that_are_none(stand: Stand) -> None:
    stand.script("a", "b")
    attempt, other = await stand.attempt("r1"), await stand.attempt("r2")
    client = stand.client(attempt)
    elsewhere = await stand.client(other).responses.create(model="m", input="hi")
    raw = await client.completions.create(model="m", prompt="hi")
    for id in ("resp_1", elsewhere.id, raw.id):
        with pytest.raises(openai.NotFoundError, match="no previous response") as caught:
            await client.responses.create(model="m", input="more", previous_response_id=id)
        assert caught.value.code == "previous_response_not_found"
    assert len(await stand.store.events("r1")) == 3


async def test_result_of_a_call_the_previous_response_did_not_make(stand: Stand) -> None:
    stand.script("a")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    first = await client.responses.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError, match="no function_call before"):
        await client.responses.create(model="m", input=[RESULT], previous_response_id=first.id)


async def ask(client: openai.AsyncOpenAI, stream: bool) -> str:
    if not stream:
        return (await client.responses.create(model="m", input=QUESTION)).output_text
    async with client.responses.stream(model="m", input=QUESTION) as events:
        return (await events.get_final_response()).output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failures(stand: Stand, stream: bool) -> None:
    stand.script(EngineError("out of order"), Breaks("one two"), "fine")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    with pytest.raises(openai.InternalServerError, match="out of order") as caught:
        await ask(client, stream)
    assert caught.value.status_code == 503
    with pytest.raises(openai.APIError, match="broke off"):
        await ask(client, stream)
    assert await ask(client, stream) == "fine"
    turns = await stand.store.turns("r1")
    assert [turn.finish for turn in turns] == ["error", "error", "stop"]
    assert [event.data["code"] for event in await stand.store.events("r1")] == ["engine_error"] * 2


async def test_failed_in_mid_stream(stand: Stand) -> None:
    stand.script(Breaks("one two"))
    attempt = await stand.attempt("r1")
    seen: list[Any] = []
    stream = await stand.client(attempt).responses.create(model="m", input=QUESTION, stream=True)

    async def watch() -> None:
        async for event in stream:
            seen.append(event)  # noqa: PERF401 (those before the error count)

    with pytest.raises(openai.APIError, match="broke off"):
        await watch()
    assert seen[-1].type == "response.failed"
    assert (seen[-1].response.status, seen[-1].response.error.code) == ("failed", "server_error")
    assert "broke off" in seen[-1].response.error.message


async def test_context_overflow(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    with pytest.raises(openai.BadRequestError) as caught:
        await stand.client(attempt).responses.create(model="m", input="ab" * 2000)
    assert caught.value.code == "context_length_exceeded"
    (event,) = await stand.store.events("r1")
    assert event.data["code"] == "context_length_exceeded"
