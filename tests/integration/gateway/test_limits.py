"""How much a gateway takes on, and for how long: caps, deadlines, clients that do not read."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from msgspec.structs import replace

from strop.engines.scripted import Scripted
from strop.errors import StoreError
from strop.gateway.limits import Limits
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from strop.net import bounds
from strop.types import Sampling
from tests.integration.gateway.stand import Stand
from tests.integration.gateway.test_routes import HI, chunk, faked, gateway


@asynccontextmanager
async def limited(folder: Path, renderer: Renderer, *, latency: float = 0.0, **limits: Any) -> AsyncIterator[Stand]:
    async with gateway(folder, renderer, Limits(**limits)) as stand:
        stand.engine._latency = latency
        yield stand


def ask(stand: Stand, attempt: Any, **more: Any) -> Any:
    return stand.client(attempt).chat.completions.create(model="m", messages=HI, **more)


async def test_over_the_cap_of_an_attempt_or_of_all(renderer: Renderer, tmp_path: Path) -> None:
    async with limited(tmp_path / "g", renderer, latency=0.05, in_flight=3, per_attempt=2) as stand:
        stand.engine._script = lambda asked: "one two three four"
        one, two = await stand.attempt("r1"), await stand.attempt("r2")
        first = [asyncio.create_task(ask(stand, one)) for _ in range(2)]
        await asyncio.sleep(0.15)
        with pytest.raises(openai.RateLimitError, match="this attempt has 2 requests in flight") as caught:
            await ask(stand, one)
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        third = asyncio.create_task(ask(stand, two))
        await asyncio.sleep(0.1)
        async with anthropic.AsyncAnthropic(
            base_url=stand.url(two).removesuffix("/v1"), api_key=two.key, max_retries=0
        ) as claude:
            with pytest.raises(anthropic.RateLimitError, match="the gateway has 3 requests in flight") as said:
                await claude.messages.create(model="m", max_tokens=9, messages=HI)
        assert said.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index,call-overload]
        answers = await asyncio.gather(*first, third)
        assert len(answers) == 3
        await ask(stand, one)  # there is room again
        assert stand.gateway.counts["too_many"] == 2
        assert await stand.store.events("r1") == []


async def test_clients_come_again_by_themselves(renderer: Renderer, tmp_path: Path) -> None:
    async with limited(tmp_path / "g", renderer, latency=0.02, per_attempt=2) as stand:
        stand.engine._script = lambda asked: "one two"
        attempt = await stand.attempt("r1")
        client = stand.client(attempt, max_retries=5)
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=HI) for _ in range(4)))
        assert len(await stand.store.turns("r1")) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_the_engines_work(renderer: Renderer, tmp_path: Path, stream: bool) -> None:
    async with limited(tmp_path / "g", renderer, latency=0.1, deadline=0.5) as stand:
        stand.script(" ".join(["word"] * 100))
        attempt = await stand.attempt("r1")

        async def read() -> None:
            answer = await ask(stand, attempt, stream=stream)
            async for _ in answer:
                pass

        with pytest.raises(openai.APIError, match=r"took longer than 0.5 s.*gateway.deadline") as caught:
            await read()
        if not stream:
            assert isinstance(caught.value, openai.APIStatusError)
            assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        (played,) = stand.engine.calls
        sampled = len(played.ids)
        await asyncio.sleep(0.3)
        assert len(played.ids) == sampled < 20
        (turn,) = await stand.turns(attempt)
        assert (turn.finish, turn.response_ids) == ("error", played.ids)
        (event,) = await stand.store.events("r1")
        assert (event.data["status"], event.data["code"]) == (504, "deadline_exceeded")


async def test_a_client_that_reads_nothing_holds_little_and_blocks_nobody(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CLOSE_TIME", 0.5)
    async with gateway(tmp_path / "g", renderer, Limits(deadline=2.0)) as stand:
        stand.engine = engine = Scripted(lambda asked: "word " * 50_000, renderer, chunk=1, context=10**6)
        route = stand.gateway.routes.find("main", None)
        # Plenty to say, as fast as it is taken.
        endless = replace(route, engine=engine, sampling_for=lambda _: Sampling(max_tokens=10**6))
        stand.gateway.routes = Routes({"*": endless})
        silent, other = await stand.attempt("r1"), await stand.attempt("r2")
        place = urlsplit(stand.url(silent))
        _, writer = await asyncio.open_connection(place.hostname, place.port, limit=1024)
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST {place.path}/chat/completions HTTP/1.1\r\nhost: [::1]\r\nauthorization: Bearer {silent.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        tracemalloc.start()
        try:
            await asyncio.sleep(0.5)
            before, _ = tracemalloc.get_traced_memory()
            taken = len(engine.calls[0].ids)
            await asyncio.sleep(0.5)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(engine.calls[0].ids) == taken < 50_000, "the engine is asked for no more than is taken"
        assert after - before < 1 << 20
        engine._script = lambda asked: "hello"
        answer = await asyncio.wait_for(ask(stand, other), 5)
        assert answer.choices[0].message.content == "hello"
        async with asyncio.timeout(10):
            while not (turns := await stand.store.turns("r1")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert turns[0].finish == "error"
        await stand.gateway.wait_until_idle("r1", 1)

        async def write() -> None:
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.2)

        with pytest.raises(ConnectionError):  # the connection is not kept for ever either
            await asyncio.wait_for(write(), 10)
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_cannot_write_ends_an_answer_with_a_sentence(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def full(turns: Any) -> None:
        raise StoreError("the disk is full")

    stand.script("a b c")
    monkeypatch.setattr(stand.store, "add_turns", full)
    attempt = await stand.attempt("r1")

    async def read() -> None:
        async for _ in await ask(stand, attempt, stream=stream):
            pass

    with pytest.raises(openai.APIError, match="the disk is full"):
        await read()


async def test_a_reader_that_takes_nothing_of_an_outside_stream_holds_the_provider_back(
    renderer: Renderer, tmp_path: Path
) -> None:
    sent = 0

    async def answer(number: int, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": chunk("x" * 8000), "more_body": True})
            sent += 8000

    async with faked(answer, tmp_path / "g", renderer, limits=Limits(deadline=2.0)) as (fake, stand):
        attempt = await stand.attempt("r1")
        place = urlsplit(stand.url(attempt, "judge"))
        _, writer = await asyncio.open_connection(place.hostname, place.port, limit=1024)
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST {place.path}/chat/completions HTTP/1.1\r\nhost: [::1]\r\nauthorization: Bearer {attempt.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(1.0)
        held = sent  # what sockets hold on two ways
        await asyncio.sleep(0.5)
        assert 0 < held == sent < 10_000 * 8000
        await asyncio.wait_for(fake.gone.wait(), 5)
        await stand.gateway.wait_until_idle("r1", 1)
        (turn,) = await stand.store.turns("r1")
        assert turn.finish == "error"
        writer.close()
