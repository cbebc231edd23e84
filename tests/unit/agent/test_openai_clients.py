"""The clients agents are handed send what the package's own would send, and go through what others put in its way."""

import asyncio
import contextlib
import json
import pathlib
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources.chat.completions import AsyncCompletions, Completions
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from strop.agent.openai_clients import AsyncAttemptClient, AttemptClient
from strop.agent.transports import httpx

ANSWER = {
    "id": "turn-1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning": "not in the package's types",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
        }
    ],
}
SAID = ChatCompletion.model_validate(ANSWER).choices[0].message
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class Sent:
    """Clients of both kinds that answer from here, and the bodies that they sent."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        transport = httpx.MockTransport(self._answer)
        http, http_async = (
            openai.DefaultHttpxClient(transport=transport),
            openai.DefaultAsyncHttpxClient(transport=transport),
        )
        place: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
        self.clients = [kind(**place, http_client=http) for kind in (openai.OpenAI, AttemptClient)]
        self.async_clients = [
            kind(**place, http_client=http_async) for kind in (openai.AsyncOpenAI, AsyncAttemptClient)
        ]

    def _answer(self, request: Any) -> Any:
        self.bodies.append(json.loads(request.content))
        return httpx.Response(200, json=ANSWER)

    def compare(self, **asked: Any) -> dict[str, Any]:
        """What our clients sent, which is what the package's own sent."""
        said = [client.chat.completions.create(**asked) for client in self.clients]

        async def ask() -> list[Any]:
            return [await client.chat.completions.create(**asked) for client in self.async_clients]

        said += asyncio.run(ask())
        assert all(one == said[0] for one in said)
        theirs, ours, theirs_async, ours_async = self.bodies[-4:]
        assert theirs == ours == theirs_async == ours_async
        return ours


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "hi"}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "grüße"}, {"type": "image_url", "image_url": {"url": "u"}}],
            }
        ],
        [{"role": "user", "content": "hi"}, SAID, {"role": "tool", "tool_call_id": "c", "content": "3"}],
        [{"role": "assistant", "content": None, "tool_calls": SAID.tool_calls}],
        [{"role": "assistant", "tool_calls": [call.model_dump() for call in SAID.tool_calls or []], "unknown": 1.5}],
        ({"role": "user", "content": "in a tuple"},),
        [ChatCompletionMessage(role="assistant", content="made by hand")],
    ],
    ids=lambda given: f"{type(given).__name__} of {len(given)}",
)
@pytest.mark.parametrize(
    "more", [{}, {"tools": TOOLS, "temperature": 0.5}, {"tools": TOOLS, "extra_body": {"top_k": 3}}]
)
def test_what_is_sent_is_what_the_package_would_send(messages: Any, more: dict[str, Any]):
    body = Sent().compare(model="m", messages=messages, **more)
    assert len(body["messages"]) == len(messages)
    assert ("tools" in body) == ("tools" in more)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.none() | st.text()},
        optional={"name": st.text(), "tool_calls": st.just(SAID.tool_calls), "anything": JSON},
    )
    | st.just(SAID),
    max_size=4,
)


@settings(max_examples=60)
@given(MESSAGES, JSON)
def test_any_messages_are_sent_as_the_package_sends_them(messages: Any, extra: Any):
    Sent().compare(model="m", messages=messages, extra_body={"extra": extra})


def test_the_extra_body_wins_over_messages_as_it_does_there():
    body = Sent().compare(model="m", messages=[{"role": "user", "content": "hi"}], extra_body={"messages": "others"})
    assert body["messages"] == "others"


def test_what_only_the_package_can_send_goes_its_way(tmp_path: pathlib.Path):
    sent = Sent()
    for client in sent.clients:  # a generator can be gone through once
        client.chat.completions.create(model="m", messages=({"role": "user", "content": text} for text in "ab"))
    assert sent.bodies[0] == sent.bodies[1]
    assert len(sent.bodies[1]["messages"]) == 2
    for client in sent.clients:
        with pytest.raises(TypeError, match="JSON"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": tmp_path}])  # pyright: ignore
        with pytest.raises(TypeError, match="messages"):
            client.chat.completions.create(model="m")  # pyright: ignore
        with pytest.raises(ValueError, match="JSON"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": float("nan")}])  # pyright: ignore


@pytest.mark.parametrize("name", ["with_raw_response", "with_streaming_response"])
def test_raw_responses_too(name: str):
    sent = Sent()
    for client in sent.clients:
        raw = getattr(client.chat.completions, name).create(model="m", messages=[{"role": "user", "content": "hi"}])
        with raw if name == "with_streaming_response" else contextlib.nullcontext(raw) as answer:
            assert answer.status_code == 200
    assert sent.bodies[0] == sent.bodies[1]


def test_tracing_that_patches_the_package_sees_the_messages(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    create, create_async = Completions.create, AsyncCompletions.create

    def traced(self: Any, **asked: Any) -> Any:
        seen.append(asked["messages"])
        return create(self, **asked)

    async def traced_async(self: Any, **asked: Any) -> Any:
        seen.append(asked["messages"])
        return await create_async(self, **asked)

    monkeypatch.setattr(Completions, "create", traced)
    monkeypatch.setattr(AsyncCompletions, "create", traced_async)
    Sent().compare(model="m", messages=[{"role": "user", "content": "hi"}])
    assert seen == [[{"role": "user", "content": "hi"}]] * 4


def test_copies_are_of_the_same_kind():
    client = Sent().clients[1].with_options(max_retries=0)
    assert isinstance(client, AttemptClient)
    assert isinstance(client, openai.OpenAI)
