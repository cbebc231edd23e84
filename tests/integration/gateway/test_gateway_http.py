"""What a client sees that is not OpenAI's: refusals by name, events, health, the port."""

import socket
import time
from typing import Any

import pytest

from strop.errors import PlaceError
from strop.net.server import serve
from tests.integration.gateway.stand import Stand, fetch
from tests.limits import stretch

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "JSON"),
        (b"[]", None, "JSON"),
        (b"[" * 5000, None, "JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None, "JSON"),
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "length"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": HI, "logit_bias": {"5": 1}}, "logit_bias", "since tokens are drawn from the model's own"),
        ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"messages": HI, "frequency_penalty": 5}, "frequency_penalty", "<= 2"),
        ({"messages": HI, "top_logprobs": 5, "logprobs": True}, "top_logprobs", "since engines tell"),
        ({"messages": HI, "functions": []}, "functions", "unsupported"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice", "the tools are none. Fix: "),
        ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "cannot hold answers"),
        ({"messages": HI, "response_format": {"type": "verse"}}, "response_format", "json_schema"),
        (
            {"messages": HI, "response_format": {"type": "json_object"}, "guided_json": {}},
            "guided_json",
            "asks for a schema too",
        ),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"messages": HI, "stream_options": {"x": 1}}, "stream_options.x", "unsupported"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "float"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", ">= 1"),
        ({"messages": HI, "n": 0}, "n", ">= 1"),
        ({"messages": HI, "stop": [""]}, "stop", "empty"),
        ({"messages": HI, "tools": [{"type": "search"}]}, "tools[0]", "function"),
        ({"messages": HI, "tools": [{"type": "function", "function": {}}]}, "tools[0]", "name"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]", "wizard"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0]", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
        ({"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages[1].tool_call_id", "'c'"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": 3}]}]}, "messages[0]", "tool_calls[0].id"),
    ],
)
async def test_refusals(stand: Stand, body: Any, param: str | None, words: str) -> None:
    attempt = await stand.attempt("r1")
    status, answer = await fetch(stand.url(attempt) + "/chat/completions", body, key=attempt.key)
    assert status == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    (event,) = await stand.store.events("r1")
    assert event.data["message"] == error["message"]
    assert stand.engine.calls == []


async def test_what_changes_nothing_is_accepted(stand: Stand) -> None:
    stand.script("a")
    attempt = await stand.attempt("r1")
    body = {
        "model": None,
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HI],
        "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "store": False, "user": "u",
        "metadata": {"a": "b"}, "response_format": {"type": "text"}, "tools": [], "stream_options": None,
    }  # fmt: skip
    status, answer = await fetch(stand.url(attempt) + "/chat/completions", body, key=attempt.key)
    assert status == 200, answer
    assert (await stand.turns(attempt))[0].messages[0] == {"role": "system", "content": "x"}


async def test_events(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    reward = {"kind": "reward", "data": {"name": "format", "value": 0.5}}

    async def say(body: Any) -> tuple[int, Any]:
        return await fetch(stand.events_url(attempt), body, key=attempt.key)

    assert await say(reward) == (200, {"recorded": 1})
    assert await say([{"kind": "message", "data": {"text": "hi"}}, {"kind": "span"}]) == (200, {"recorded": 2})
    assert [event.kind for event in await stand.store.events("r1")] == ["reward", "message", "span"]
    for bad in ({"kind": "reward", "data": {"value": "much"}}, {"kind": "secret", "data": {}}, b"{"):
        status, answer = await say(bad)
        assert status == 400
        assert answer["error"]["message"]
    await stand.store.finish("r1", 1)
    for _ in range(2):
        status, answer = await say(reward)
        assert (status, answer["error"]["code"]) == (409, "attempt_over")


async def test_keys_are_compared_as_bytes(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    for key in ("", "\xe9", attempt.key + "x"):
        status, answer = await fetch(stand.url(attempt) + "/models", key=key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert (await fetch(stand.url(attempt) + "/models", key=attempt.key))[0] == 200
    assert (await fetch(stand.server.url + "/r/nobody/1/agents/main/v1/models", key="x"))[0] == 401


async def test_health(stand: Stand) -> None:
    status, answer = await fetch(stand.server.url + "/health")
    assert (status, answer["status"]) == (200, "ok")
    status, answer = await fetch(stand.server.url + "/v1/chat/completions", {})
    assert status == 401, "an address without a rollout is open to whoever sends an attempt's key"
    status, answer = await fetch(stand.server.url + "/v2/chat/completions", {})
    assert status == 404
    assert "base URL" in answer["error"]["message"]


async def test_port_in_use(stand: Stand) -> None:
    port = int(stand.server.url.rpartition(":")[2])
    with pytest.raises(PlaceError, match=rf"{port}.*gateway\.port=0"):
        await serve(stand.gateway, port=port)
    with pytest.raises(PlaceError, match=r"gateway\.host"):
        await serve(stand.gateway, host="no.such.host.invalid")
    with pytest.raises(PlaceError, match=r"gateway\.host"):
        await serve(stand.gateway, host="192.0.2.1")


async def test_server_closes(stand: Stand) -> None:
    server = await serve(stand.gateway)
    port = int(server.url.rpartition(":")[2])
    await server.close()
    with pytest.raises(OSError, match="refused"), socket.socket() as sock:
        sock.connect(("127.0.0.1", port))


async def test_a_body_larger_than_any_conversation(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    url = stand.url(attempt) + "/chat/completions"
    status, answer = await fetch(url, b" " * (17 << 20), key=attempt.key)
    assert status == 413
    assert answer["error"]["code"] == "request_too_large"
    began = time.monotonic()
    status, answer = await fetch(url, {"messages": [{"role": "user", "content": "x" * (8 << 20)}]}, key=attempt.key)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < stretch(5)  # it was not tokenised to find that out


async def test_arguments_nested_too_deeply(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    deep = '{"a": ' * 800 + "1" + "}" * 800
    call = CALL | {"function": {"name": "f", "arguments": deep}}
    body = {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]}
    status, answer = await fetch(stand.url(attempt) + "/chat/completions", body, key=attempt.key)
    assert status in (200, 400)
    assert status == 200 or answer["error"]["type"] == "invalid_request_error"


async def test_an_attempt_that_is_no_number(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    for number in ("9" * 5000, "x", "-1"):
        url = f"{stand.server.url}/r/r1/{number}/agents/main/v1/chat/completions"
        assert (await fetch(url, {"messages": HI}, key=attempt.key))[0] == 401


async def test_events_that_are_no_text(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    status, answer = await fetch(
        stand.events_url(attempt), b'{"kind": "message", "data": {"a": "\xff"}}', key=attempt.key
    )
    assert status == 400
    assert "event" in answer["error"]["message"]
