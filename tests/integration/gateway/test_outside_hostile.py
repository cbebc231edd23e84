"""Outside models where something is wrong: odd requests on their way there, odd answers on their way back. And what a
server with a store and a model says to requests that neither of them takes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from strop.config import OutsideConfig
from strop.engines.scripted import Scripted
from strop.errors import ConfigError
from strop.gateway.app import Gateway
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.run.serve import serve_store
from tests.integration.gateway.hostile import BODIES, COUNTS, ask, connected, error, events, unharmed
from tests.integration.gateway.stand import Stand, fetch
from tests.integration.gateway.test_routes import COMPLETION, HI, chunk, faked, gateway, policy, say, to

EVENTS = (b"content-type", b"text/event-stream")


class Provider:
    """Answers everything with the same bytes, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes, list[tuple[bytes, bytes]]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append((scope["path"], scope["query_string"], scope["headers"]))
        while (await receive()).get("more_body"):
            pass
        await say(send, 200, COMPLETION, (b"content-type", b"application/json"))


@asynccontextmanager
async def provided(folder: Path, renderer: Renderer, **more: Any) -> AsyncIterator[tuple[Provider, Stand]]:
    provider = Provider()
    server = await serve(provider)
    outside = OutsideConfig(url=f"{server.url}/v1", agents=("*",), **more)
    async with gateway(folder, renderer, far=outside) as stand:
        yield provider, stand
    await server.close()


# -- on the way there --------------------------------------------------------------------------------------------------


async def test_headers_that_come_twice_and_odd_queries(renderer: Renderer, tmp_path: Path) -> None:
    async with provided(tmp_path / "g", renderer) as (provider, stand):
        attempt = await stand.attempt("r1")
        twice = ["anthropic-beta: one", "anthropic-beta: two", "anthropic-version: \xff"]
        for query in ("?a=1&b=%20", '?a|b^`{}\\"<'):
            status, _, body = await ask(stand, attempt, f"chat/completions{query}", BODIES["chat/completions"], *twice)
            assert (status, body) == (200, COMPLETION)
        assert [query for _, query, _ in provider.asked] == [b"a=1&b=%20", b"a%7Cb%5E%60%7B%7D%5C%22%3C"]
        for _, _, headers in provider.asked:
            assert [value for name, value in headers if name == b"anthropic-beta"] == [b"one, two"]
            assert (b"anthropic-version", b"\xff") in headers
        # What is not even ASCII the server takes for no HTTP.
        status, _, _ = await ask(stand, attempt, "chat/completions?\xff", BODIES["chat/completions"])
        assert (status, len(provider.asked)) == (400, 2)


@pytest.mark.parametrize("path", list(BODIES))
async def test_whatever_is_sent_is_the_providers_to_judge(renderer: Renderer, tmp_path: Path, path: str) -> None:
    odd = [
        b"",
        b"{",
        b'{"model": "\\ud800"}',
        b'{"messages": 5, "n": 1e999}',
        b"\xff\xfe",
        b'{"n": -3}',
    ]
    odd += [json.dumps(BODIES[path] | {name: value}).encode() for name in BODIES[path] for value in (None, 5, [[]], {})]
    async with provided(tmp_path / "g", renderer, model="big") as (provider, stand):
        attempt = await stand.attempt("r1")
        for body in odd:
            status, _, answer = await ask(stand, attempt, path, body)
            assert (status, answer) == (200, COMPLETION), body
        assert len(provider.asked) == len(odd) == len(await stand.store.turns("r1"))
        assert stand.gateway.sessions["r1", 1].in_flight == 0


async def test_counting_is_passed_on(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(tmp_path / "p", renderer) as provider:
        there = await provider.attempt("p1")
        monkeypatch.setenv("PROVIDER_KEY", there.key)
        async with gateway(tmp_path / "g", renderer, far=to(provider, there, agents=("*",), model="big")) as stand:
            attempt = await stand.attempt("r1")
            for path, body in COUNTS.items():
                direct = await ask(provider, there, path, body)
                passed = await ask(stand, attempt, path, body)
                assert (passed[0], passed[2]) == (200, direct[2])
                assert "x-strop-turn" not in passed[1]
                status, _, answer = await ask(stand, attempt, path, b"{")
                assert status == 400
                assert error(path, answer)
            base = stand.url(attempt).removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=base, api_key=attempt.key, max_retries=0) as claude:
                assert (await claude.messages.count_tokens(model="m", messages=HI)).input_tokens > 5
            assert [event["status"] for event in await events(stand, attempt)] == [400, 400]
            assert await stand.store.turns("r1") == await provider.store.turns("p1") == []


async def test_counting_where_the_provider_cannot(renderer: Renderer, tmp_path: Path) -> None:
    async with provided(tmp_path / "g", renderer, dialects=("chat/completions",)) as (_, stand):
        attempt = await stand.attempt("r1")
        for path, body in COUNTS.items():
            status, _, answer = await ask(stand, attempt, path, body)
            assert (status, f"does not speak {path}, only chat" in error(path, answer)) == (404, True)
        assert [event["status"] for event in await events(stand, attempt)] == [404, 404]


# -- on the way back ---------------------------------------------------------------------------------------------------


async def test_halves_of_characters_are_put_together(renderer: Renderer, tmp_path: Path) -> None:
    call = {"tool_calls": [{"index": 0, "id": "\ud800", "function": {"name": "f", "arguments": '{"a": "\\ud83d'}}]}
    rest = {"tool_calls": [{"index": 0, "function": {"arguments": '\\ude42"}'}}]}

    async def answer(number: int, send: Any) -> None:
        deltas: list[Any] = [{"content": "\ud83d"}, {"content": "\ude42 \ud83d"}, call, rest, {"content": 5}]
        bodies: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        bodies += [{"choices": [{"index": [], "delta": {"tool_calls": [{"index": "x", "id": 7}]}}]}, [], 7]
        bodies.append({"choices": [], "usage": {"total_tokens": 7, "by": "\udc00"}})
        data = b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies)
        await say(send, 200, data + b"data: [DONE]\n\n", EVENTS)

    async with faked(answer, tmp_path / "g", renderer, agents=("*",)) as (_, stand):
        attempt = await stand.attempt("r1")
        status, _, body = await ask(stand, attempt, "chat/completions", BODIES["chat/completions"] | {"stream": True})
        assert (status, b'"\\ud83d"' in body) == (200, True), "what passes is not changed"
        (turn,) = await stand.store.turns("r1")
        assert turn.answer["content"] == "🙂 �5"
        (made,) = turn.answer["tool_calls"]
        assert (made["id"], made["function"]) == ("�", {"name": "f", "arguments": {"a": "🙂"}})
        assert turn.requested["outside"]["usage"] == {}
        assert stand.gateway.counts["outside_unread"] == 1


async def test_an_event_that_never_ends_is_not_kept(renderer: Renderer, tmp_path: Path) -> None:
    async def answer(number: int, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"\n\ndata: [DONE]\n\n"})

    async with faked(answer, tmp_path / "g", renderer, agents=("*",)) as (_, stand):
        attempt = await stand.attempt("r1")
        _, _, body = await ask(stand, attempt, "chat/completions", BODIES["chat/completions"] | {"stream": True})
        assert len(body) == (20 << 20) + 16
        assert stand.gateway.counts["outside_unread"] == 1


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("why", ["a mistake", "the attempt is over"])
async def test_what_goes_wrong_in_mid_stream(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    go_on = asyncio.Event()
    half = b'data: {"type":"response.output_text.delta","delta":"half"}\n\n' if path == "responses" else chunk("half")

    async def answer(number: int, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
        await send({"type": "http.response.body", "body": half, "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def broken(turns: Any) -> None:
        raise ZeroDivisionError("division by zero")

    async with faked(answer, tmp_path / "g", renderer, agents=("*",)) as (_, stand):
        attempt = await stand.attempt("r1")
        asked = asyncio.create_task(ask(stand, attempt, path, BODIES[path] | {"stream": True}))
        async with asyncio.timeout(10):
            while ("r1", 1) not in stand.gateway.sessions or not stand.gateway.sessions["r1", 1].in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        if why == "a mistake":
            monkeypatch.setattr(stand.store, "add_turns", broken)
        else:
            await stand.store.finish("r1", 1)
        go_on.set()
        status, _, body = await asked
        assert (status, b"[DONE]" in body) == (200, False)
        told = error(path, body.replace(half, b""))
        if why == "a mistake":
            assert "an error of its own" in told
            (event,) = await events(stand, attempt)
            assert event["status"] == 500
        else:
            assert "over" in told
            assert ("r1", 1) not in stand.gateway.sessions, "nobody will ask for it again"
        assert stand.gateway._requests._in_flight.total() == 0


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [{"agents": ("*",)}, {"models": ("*",)}, {"agents": ("x",)}])
def test_two_outside_models_for_the_same(renderer: Renderer, names: dict[str, Any]) -> None:
    route = policy(Scripted([], renderer), renderer)
    both = {name: OutsideConfig(url="http://127.0.0.1:9/v1", **names) for name in "ab"}
    with pytest.raises(
        ConfigError, match=r"gateway\.outside\.b: another outside model has '[*x]' too\. Fix: leave one out"
    ):
        Routes.of(route, both)
    Routes.of(route, {"a": both["a"]})


# -- what is not offered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        *(("GET", path, 405, "use POST") for path in (*BODIES, *COUNTS)),
        ("POST", "models", 405, "use GET"),
        ("DELETE", "models/tiny", 405, "use GET"),
        ("GET", "models/other", 404, "no model 'other' here. Fix: ask for 'tiny'"),
        ("GET", "responses/resp_1", 404, "previous_response_id"),
        ("DELETE", "responses/resp_1", 404, "previous_response_id"),
        ("POST", "responses/resp_1/cancel", 404, "previous_response_id"),
        ("GET", "messages/batches", 404, "of a batch one by one"),
        ("POST", "messages/batches", 404, "of a batch one by one"),
        ("GET", "chat/completions/c1", 404, "keep what you were answered"),
        ("POST", "images/generations", 404, ", with POST"),
    ],
)
async def test_what_is_not_offered(stand: Stand, method: str, path: str, status: int, words: str) -> None:
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt), connected(stand, attempt) as raw:
        raw.head(path, "content-length: 0", method=method)
        got, headers, body = await raw.answer()
    assert (got, words in error(path, body)) == (status, True), body
    assert headers.get("allow") == (words.removeprefix("use ") if status == 405 else None)
    (event,) = await events(stand, attempt)
    assert (event["status"], event["message"]) == (status, error(path, body))


# -- a store and a model at one address --------------------------------------------------------------------------------


async def test_what_a_server_with_a_store_and_a_model_says(stand: Stand, renderer: Renderer) -> None:
    stand.engine._script = lambda asked: "ok"
    attempt = await stand.attempt("r1")
    server = await serve_store(stand.store, key="run", gateway=Gateway(stand.store, stand.gateway.routes))
    try:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=attempt.key, max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=server.url, api_key=attempt.key, max_retries=0)
        stand.clients.append(client)
        assert (await client.models.retrieve("tiny")).id == "tiny"
        assert (await claude.models.retrieve("tiny")).type == "model"
        with pytest.raises(openai.NotFoundError, match="no model 'other' here") as unknown:
            await client.models.retrieve("other")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(anthropic.NotFoundError, match="no model 'other' here"):
            await claude.models.retrieve("other")
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.retrieve("resp_1")
        with pytest.raises(anthropic.NotFoundError, match="of a batch one by one") as batches:
            await claude.messages.batches.list()
        assert batches.value.type == "not_found_error"
        for path in (*BODIES, *COUNTS):
            status, said = await fetch(f"{server.url}/v1/{path}", key=attempt.key)
            assert (status, "use POST" in said["error"]["message"]) == (405, True)
        assert (await fetch(f"{server.url}/v1/rollouts", key="run"))[0] == 200, "the store's own addresses are its own"
        await claude.close()
    finally:
        await server.close()


async def test_a_model_with_a_slash_in_its_name(renderer: Renderer, tmp_path: Path) -> None:
    far = OutsideConfig(url="http://127.0.0.1:9/v1", models=("org/big",))
    async with gateway(tmp_path / "g", renderer, far=far) as stand:
        attempt = await stand.attempt("r1")
        assert (await stand.client(attempt).models.retrieve("org/big")).id == "org/big"
        async with connected(stand, attempt) as raw:
            raw.head("models/org/big", method="GET")
            assert (await raw.answer())[0] == 200
