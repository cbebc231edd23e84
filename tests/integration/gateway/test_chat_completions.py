"""OpenAI's own client, over a socket, against recorded turns."""

import asyncio
import itertools
import json
from typing import Any

import openai
import pytest

from strop.demo import TOOLS, run_tool
from strop.engines.scripted import Breaks
from strop.errors import EngineError
from strop.types import Turn
from tests.integration.gateway.stand import Stand

CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
QUESTION: Any = [{"role": "user", "content": "What is 3 * 4? 🙂"}]


def check_appends(turns: list[Turn]) -> None:
    for before, after in itertools.pairwise(turns):
        assert after.parent == before.id
        assert after.branch is None
        assert after.shared == len(before.ids)
        assert after.prompt_ids[: after.shared] == before.ids


def converse(client: openai.OpenAI) -> tuple[str, list[str]]:
    """An agent's loop, as one writes it with the client that is not async."""
    messages, ids = list(QUESTION), []
    while True:
        completion = client.chat.completions.create(model="any", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        ids.append(completion.id)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            assert completion.choices[0].finish_reason == "stop"
            return message.content, ids
        assert completion.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            _, result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def test_tool_conversation(stand: Stand) -> None:
    stand.script(CALL, CALL, "It is 12. 🙂")
    attempt = await stand.attempt("r1")
    with openai.OpenAI(base_url=stand.url(attempt), api_key=attempt.key, max_retries=0) as client:
        answer, ids = await asyncio.to_thread(converse, client)
    assert answer == "It is 12. 🙂"
    turns = await stand.turns(attempt)
    assert [turn.id for turn in turns] == ids == ["r1/1/0", "r1/1/1", "r1/1/2"]
    assert [turn.finish for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    check_appends(turns)
    assert turns[0].answer["content"] == "Let me see."
    assert turns[0].versions == [(0, "1.0")]
    assert turns[0].policy == "p"
    assert stand.gateway.counts["turns"] == 3


async def collect(stream: Any) -> tuple[dict[str, Any], str | None, Any]:
    """A stream put together the way clients do; the message as it is sent back."""
    text, calls, finish, usage = "", [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            assert "<tool" not in piece
            assert "\ufffd" not in piece
            text += piece
            for call in choice.delta.tool_calls or []:
                assert call.index == len(calls)
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": call.id, "type": "function", "function": function})
            finish = choice.finish_reason or finish
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return (message | {"tool_calls": calls} if calls else message), finish, usage


async def test_streamed_tool_conversation(stand: Stand) -> None:
    stand.script(f"🙂 é {CALL}\n{CALL}", "It is 12 < 13. 🙂\n", "bye")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    messages = list(QUESTION)
    finishes = []
    for _ in range(3):
        stream = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        message, finish, usage = await collect(stream)
        finishes.append(finish)
        messages.append(message)
        calls = message.get("tool_calls", [])
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "12"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "more"})
        turns = await stand.turns(attempt)
        assert usage.prompt_tokens == len(turns[-1].prompt_ids)
        assert usage.completion_tokens == len(turns[-1].response_ids)
    assert finishes == ["tool_calls", "stop", "stop"]
    check_appends(turns)
    assert messages[1]["content"] == "🙂 é Let me see.\nLet me see."
    assert len(messages[1]["tool_calls"]) == 2
    assert messages[4]["content"] == "It is 12 < 13. 🙂\n"


async def test_streaming_changes_nothing_but_the_delivery(stand: Stand) -> None:
    answers = []
    for i, stream in enumerate((False, True)):
        stand.script(CALL)
        attempt = await stand.attempt(f"r{i}", seed=5)
        result = await stand.client(attempt).chat.completions.create(
            model="any", messages=QUESTION, tools=TOOLS, stream=stream
        )  # type: ignore[call-overload]
        if stream:
            await collect(result)
        answers.append((await stand.turns(attempt))[0])
    for field in ("prompt_ids", "response_ids", "logprobs", "answer", "finish", "sampling"):
        assert getattr(answers[0], field) == getattr(answers[1], field)


async def test_turn_is_durable_before_the_end_of_the_stream(stand: Stand) -> None:
    stand.script("one two three")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    stream = await client.chat.completions.create(model="any", messages=QUESTION, stream=True)
    assert stream.response.headers["x-strop-turn"] == "r1/1/0"
    async for chunk in stream:
        assert chunk.id == "r1/1/0"
        recorded = await stand.store.turns("r1", attempt=1)
        if chunk.choices[0].finish_reason:
            assert [turn.finish for turn in recorded] == ["stop"]


async def test_policy_settings_win(stand: Stand) -> None:
    stand.script("a", "b")
    train, evaluation = await stand.attempt("r1"), await stand.attempt("r2", mode="eval", seed=2)
    asked: Any = {"temperature": 0.3, "top_p": 0.5, "seed": 9, "max_tokens": 50}
    own: Any = {"repetition_penalty": 1.5}
    for attempt in (train, evaluation):
        client = stand.client(attempt)
        await client.chat.completions.create(model="gpt-4o", messages=QUESTION, **asked, extra_body=own)
    (turn,), (greedy,) = await stand.turns(train), await stand.turns(evaluation)
    assert turn.requested == asked | own | {"model": "gpt-4o"}
    assert turn.sampling.repetition_penalty == 1.0
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (1.0, 1.0, 50)
    assert turn.sampling.seed != 9
    assert greedy.sampling.temperature == 0.0
    stand.script("c")
    await stand.client(train).chat.completions.create(model="m", messages=QUESTION, max_completion_tokens=10_000)
    assert (await stand.store.turns("r1"))[-1].sampling.max_tokens == 200


async def test_stop_strings_and_length(stand: Stand) -> None:
    stand.script("one two three", "one two three", "one two three four five six seven")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    completion = await client.chat.completions.create(model="m", messages=QUESTION, stop=["wo", "zzz"])
    assert completion.choices[0].message.content == "one t"
    assert completion.choices[0].finish_reason == "stop"
    message, finish, _ = await collect(
        await client.chat.completions.create(model="m", messages=QUESTION, stop="wo", stream=True)
    )
    assert (message["content"], finish) == ("one t", "stop")
    completion = await client.chat.completions.create(model="m", messages=QUESTION, max_tokens=3)
    assert completion.choices[0].finish_reason == "length"
    turns = await stand.turns(attempt)
    assert [turn.finish for turn in turns] == ["stop", "stop", "length"]
    assert [call.finished for call in stand.engine.calls] == [False, False, True]


async def test_one_call_only(stand: Stand) -> None:
    stand.script(f"{CALL}\n{CALL}", "done")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    completion = await client.chat.completions.create(
        model="m", messages=QUESTION, tools=TOOLS, parallel_tool_calls=False
    )  # type: ignore[call-overload]
    message = completion.choices[0].message
    assert len(message.tool_calls) == 1
    assert completion.choices[0].finish_reason == "tool_calls"
    follow = [
        *QUESTION,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"},
    ]
    await client.chat.completions.create(model="m", messages=follow, tools=TOOLS)
    first, second = await stand.store.turns("r1")
    assert second.prompt_ids[: second.shared] == first.ids
    assert second.parent == first.id


async def test_malformed_calls_are_content(stand: Stand) -> None:
    stand.script("<tool_call>{nope}</tool_call>", CALL)
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    completion = await client.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)  # type: ignore[call-overload]
    assert completion.choices[0].message.content == "<tool_call>{nope}</tool_call>"
    assert completion.choices[0].message.tool_calls is None
    completion = await client.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, tool_choice="none")  # type: ignore[call-overload]
    assert completion.choices[0].message.content == CALL
    turns = await stand.turns(attempt)
    assert turns[0].answer["malformed_calls"] == 1
    assert stand.gateway.counts["malformed_calls"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(stand: Stand, stream: bool) -> None:
    stand.script("one", "two", "three")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    raw = await client.chat.completions.with_raw_response.create(model="m", messages=QUESTION, n=3, stream=stream)
    assert raw.headers["x-strop-turn"] == "r1/1/0"
    assert raw.headers["x-strop-turns"] == "r1/1/0,r1/1/1,r1/1/2"
    result: Any = raw.parse()
    texts = dict.fromkeys(range(3), "")
    if stream:
        async for chunk in result:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in result.choices}
        assert result.usage.completion_tokens == sum(len(call.ids) for call in stand.engine.calls)
    assert texts == {0: "one", 1: "two", 2: "three"}
    turns = await stand.turns(attempt)
    assert [(turn.choice, turn.choices) for turn in turns] == [(0, 3), (1, 3), (2, 3)]
    assert len({turn.sampling.seed for turn in turns}) == 3
    assert len({tuple(turn.prompt_ids) for turn in turns}) == 1
    stand.engine._script = ["x"] * 9
    follow = [*QUESTION, {"role": "assistant", "content": "two"}, {"role": "user", "content": "go on"}]
    await client.chat.completions.create(model="m", messages=follow)
    assert (await stand.turns(attempt))[-1].parent == "r1/1/1"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(stand: Stand, stream: bool) -> None:
    stand.script("héllo 🙂")
    attempt = await stand.attempt("r1")
    result: Any = await stand.client(attempt).chat.completions.create(
        model="m", messages=QUESTION, logprobs=True, top_logprobs=0, stream=stream
    )
    if stream:
        found = [t async for chunk in result if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content]
    else:
        found = result.choices[0].logprobs.content
    (turn,) = await stand.turns(attempt)
    assert [token.logprob for token in found] == turn.logprobs == [-0.5] * len(turn.response_ids)
    assert found[0].token == "h"
    assert found[0].bytes == [104]


async def test_several_agents(stand: Stand) -> None:
    stand.script("a", "b", "c")
    attempt = await stand.attempt("r1")
    main, other = stand.client(attempt), stand.client(attempt, "critic")
    first = await main.chat.completions.create(model="m", messages=QUESTION)
    await other.chat.completions.create(model="m", messages=[{"role": "user", "content": "judge"}])
    follow = [*QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
    await main.chat.completions.create(model="m", messages=follow)
    turns = await stand.turns(attempt)
    assert [(turn.agent, turn.branch, turn.parent) for turn in turns] == [
        ("main", None, None), ("critic", None, None), ("main", None, "r1/1/0"),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves(stand: Stand, stream: bool) -> None:
    stand.engine._latency = 0.05
    stand.script("one two three four five six seven eight nine ten", "again")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    if stream:
        chunks = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        seen = 0
        async for chunk in chunks:
            seen += bool(chunk.choices[0].delta.content)
            if seen == 2:
                break
        await chunks.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=QUESTION, timeout=0.3)
    for _ in range(100):
        turns = await stand.turns(attempt)
        if turns:
            break
        await asyncio.sleep(0.02)
    (turn,) = turns
    assert turn.finish == "abandoned"
    assert 0 < len(turn.response_ids) < 20
    await asyncio.sleep(0.15)
    call = stand.engine.calls[0]
    assert not call.finished
    assert call.ids == turn.response_ids, "the engine stopped, and everything it sampled is recorded"
    assert stand.gateway.counts["abandoned"] == 1
    stand.engine._latency = 0.0
    again = await client.chat.completions.create(model="m", messages=QUESTION)
    assert again.id == "r1/1/1"
    assert (await stand.turns(attempt))[1].prompt_ids == turn.prompt_ids


async def test_context_overflow(stand: Stand) -> None:
    stand.script("x")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "ab" * 2000}])
    assert caught.value.code == "context_length_exceeded"
    (event,) = await stand.store.events("r1")
    assert (event.kind, event.data["code"]) == ("error", "context_length_exceeded")
    assert await stand.turns(attempt) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failures(stand: Stand, stream: bool) -> None:
    stand.script(EngineError("out of order"), Breaks("one two"), "fine")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)

    async def ask() -> Any:
        result: Any = await client.chat.completions.create(model="m", messages=QUESTION, stream=stream)
        return (await collect(result))[0]["content"] if stream else result.choices[0].message.content

    with pytest.raises(openai.InternalServerError, match="out of order") as caught:
        await ask()
    assert caught.value.status_code == 503
    with pytest.raises(openai.APIError, match="broke off"):
        await ask()
    assert await ask() == "fine"
    turns = await stand.store.turns("r1")
    assert [turn.finish for turn in turns] == ["error", "error", "stop"]
    assert turns[1].response_ids == stand.engine.calls[1].ids
    events = await stand.store.events("r1")
    assert [event.data["code"] for event in events] == ["engine_error"] * 2


async def test_fenced_attempt(stand: Stand) -> None:
    stand.script("a", "b", "c")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt, max_retries=2)
    await client.chat.completions.create(model="m", messages=QUESTION)
    await stand.store.finish("r1", 1)
    for calls in (2, 2):  # found out when recording; then before anything is sampled
        with pytest.raises(openai.ConflictError) as caught:
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert caught.value.code == "attempt_over"
        assert len(stand.engine.calls) == calls, "not retried"
    assert len(await stand.store.turns("r1", attempt=1)) == 1


async def test_fenced_in_mid_stream(stand: Stand) -> None:
    stand.script("a b c d")
    stand.engine._latency = 0.1  # the attempt ends before the answer does
    attempt = await stand.attempt("r1")
    stream = await stand.client(attempt).chat.completions.create(model="m", messages=QUESTION, stream=True)
    await anext(stream)
    await stand.store.finish("r1", 1)
    with pytest.raises(openai.APIError, match=r"over|ended"):
        await collect(stream)
    assert await stand.store.turns("r1", attempt=1) == []


async def test_keys(stand: Stand) -> None:
    one, two = await stand.attempt("r1"), await stand.attempt("r2")
    stand.script("a")
    for client in (stand.client(one, api_key=two.key), stand.client(one, api_key="x")):
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert caught.value.code == "invalid_api_key"
    models = await stand.client(one).models.list()
    assert [model.id for model in models.data] == ["tiny"]
    with pytest.raises(openai.AuthenticationError):
        await stand.client(one, api_key=two.key).models.list()
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        await stand.client(one).embeddings.create(model="m", input="x")


async def test_sessions_are_dropped_and_rebuilt(stand: Stand) -> None:
    stand.script(*["a"] * 20)
    stand.gateway.sessions.most = 2
    attempts = [await stand.attempt(f"r{i}") for i in range(4)]
    firsts = [await stand.client(a).chat.completions.create(model="m", messages=QUESTION) for a in attempts]
    assert len(stand.gateway.sessions) == 2
    for attempt, first in zip(attempts, firsts, strict=True):
        follow = [*QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": "b"}]
        await stand.client(attempt).chat.completions.create(model="m", messages=follow)
        before, after = await stand.store.turns(attempt.rollout)
        assert (after.id, after.parent, after.shared) == (f"{attempt.rollout}/1/1", before.id, len(before.ids))
    stand.gateway.forget("r3")
    assert ("r3", 1) not in stand.gateway.sessions


async def test_seeds_do_not_depend_on_the_attempt(stand: Stand) -> None:
    stand.script(CALL, CALL)
    seen = []
    for id in ("r1", "r2"):
        attempt = await stand.attempt(id, seed=42)
        completion = await stand.client(attempt).chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)  # type: ignore[call-overload]
        (turn,) = await stand.turns(attempt)
        seen.append((turn.sampling.seed, completion.choices[0].message.tool_calls[0].id))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 9
    assert seen[0][1].isalnum(), "which is what the strictest chat templates want"
    assert json.loads(completion.choices[0].message.tool_calls[0].function.arguments) == {"expression": "3 * 4"}


async def test_a_late_first_attempt_does_not_disturb_the_second(stand: Stand) -> None:
    stand.script(*["a"] * 9)
    first = await stand.attempt("r1")
    await stand.client(first).chat.completions.create(model="m", messages=QUESTION)
    await stand.store.reclaim(everything=True)
    (lease,) = await stand.store.lease("w1", seconds=600)
    second = lease.attempt
    await stand.client(second).chat.completions.create(model="m", messages=QUESTION)
    session = stand.gateway.sessions["r1", 2]
    with pytest.raises(openai.ConflictError):
        await stand.client(first).chat.completions.create(model="m", messages=QUESTION)
    assert stand.gateway.sessions["r1", 2] is session
    (old,), (new,) = await stand.store.turns("r1", attempt=1), await stand.store.turns("r1", attempt=2)
    assert old.sampling == new.sampling, "an attempt that is repeated samples the same"


async def test_a_server_that_stops_records_what_was_under_way(stand: Stand) -> None:
    stand.engine._latency = 0.05
    stand.script("one two three four five six seven eight nine ten")
    attempt = await stand.attempt("r1")
    stream = await stand.client(attempt).chat.completions.create(model="m", messages=QUESTION, stream=True)
    await anext(stream)
    stand.server._server.config.timeout_graceful_shutdown = 0
    await stand.server.close()
    await stream.close()
    (turn,) = await stand.turns(attempt)
    assert turn.finish == "abandoned"
    assert turn.response_ids
