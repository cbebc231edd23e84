"""Bad clients and bad engines, in every model API: each is told so in that API's own shape, it is recorded for the
attempt, and nothing is left behind: no request in flight, no task, no memory."""

import asyncio
import contextlib
import gc
import json
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from strop.engines.scripted import Breaks
from strop.errors import EngineError
from strop.gateway import conversation
from strop.gateway.limits import Limits
from strop.gateway.replicas import Replicas
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from strop.types import Attempt, Sampling
from tests.integration.gateway.hostile import BODIES, COUNTS, ask, connected, error, events, unharmed
from tests.integration.gateway.stand import Stand
from tests.integration.gateway.test_routes import gateway

APIS = list(BODIES)
POSTS = BODIES | COUNTS
LARGE = 50 << 20
WORDS = "one two three four five six seven eight nine ten"

# -- bodies ------------------------------------------------------------------------------------------------------------


def filler(size: int) -> Iterable[bytes]:
    return (b" " * (1 << 20) for _ in range(size >> 20))


@pytest.mark.parametrize("path", list(POSTS))
@pytest.mark.parametrize("chunked", [False, True])
async def test_fifty_megabytes(stand: Stand, path: str, chunked: bool) -> None:
    attempt = await stand.attempt("r1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with unharmed(stand, attempt), connected(stand, attempt) as raw:
        if chunked:
            sending = asyncio.create_task(raw.chunked(path, filler(LARGE)))
        else:
            raw.head(path, f"content-length: {LARGE}")
            sending = asyncio.create_task(drained(raw.writer, filler(LARGE)))
        status, _, body = await raw.answer()
        with contextlib.suppress(ConnectionError):
            await sending
    assert (status, "larger than 16 MiB" in error(path, body)) == (413, True)
    (event,) = await events(stand, attempt)
    assert (event["status"], event["code"]) == (413, "request_too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # in KiB


async def drained(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("path", list(POSTS))
async def test_a_hundred_thousand_brackets(stand: Stand, path: str) -> None:
    attempt = await stand.attempt("r1")
    wrong = [DEEP, DEEP[:100_000], b'{"a":' * 100_000]
    wrong += [json.dumps(POSTS[path] | {name: "@"}).replace('"@"', DEEP.decode()).encode() for name in POSTS[path]]
    wrong.append(json.dumps(POSTS[path] | {"tools": [{"@": 1}]}).replace('"@": 1', '"a":' + DEEP.decode()).encode())
    async with unharmed(stand, attempt):
        for body in wrong:
            status, _, answer = await ask(stand, attempt, path, body)
            assert status == 400, answer
            assert error(path, answer)
    assert [event["status"] for event in await events(stand, attempt)] == [400] * len(wrong)


@pytest.mark.parametrize("path", list(POSTS))
async def test_millions_of_lists_do_not_hold_up_others(stand: Stand, path: str) -> None:
    stand.engine._script = lambda asked: "ok"
    attempt, other = await stand.attempt("r1"), await stand.attempt("r2")
    body = b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}"
    async with unharmed(stand, attempt):
        sent = asyncio.create_task(ask(stand, attempt, path, body))
        slowest = 0.0
        while not sent.done():
            began = time.monotonic()
            assert (await ask(stand, other, "models/tiny", b""))[0] == 405
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.01)
        status, _, answer = await sent
    assert (status, "lists" in error(path, answer)) == (413, True)
    assert slowest < 5


BROKEN: list[Any] = [
    5, [], {"type": 5}, {"type": [[]]}, {"properties": 5}, {"properties": {"a": 5}}, {"anyOf": 5}, {"items": "x"},
    {"properties": {"a": {"oneOf": [7]}}}, {"properties": {"a": {"properties": "x"}}},
]  # fmt: skip


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", *COUNTS])
async def test_broken_tool_schemas(stand: Stand, path: str) -> None:
    """They are found before the model is asked: its calls are read with their help, in the middle of a stream."""
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt):
        for schema in BROKEN:
            if path.startswith("messages"):
                tool: Any = {"name": "f", "input_schema": schema}
            else:
                tool = {"name": "f", "parameters": schema}
                tool = {"type": "function"} | ({"function": tool} if path.startswith("chat") else tool)
            status, _, answer = await ask(stand, attempt, path, POSTS[path] | {"tools": [tool]})
            assert (status, "tools[0]" in error(path, answer)) == (400, True), (schema, answer)
    assert [event["param"][:8] for event in await events(stand, attempt)] == ["tools[0]"] * len(BROKEN)


@pytest.mark.parametrize("path", list(POSTS))
async def test_a_body_that_comes_too_slowly(renderer: Renderer, tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path / "g", renderer, Limits(deadline=0.4)) as stand:
        attempt = await stand.attempt("r1")
        async with unharmed(stand, attempt), connected(stand, attempt) as raw:
            raw.head(path, "content-length: 1000")
            dripping = asyncio.create_task(drip(raw.writer))
            status, _, body = await raw.answer()
            dripping.cancel()
        assert (status, "not sent whole within 0.4 s" in error(path, body)) == (408, True)
        (event,) = await events(stand, attempt)
        assert event["status"] == 408


async def drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b" ")
        await asyncio.sleep(0.05)


# -- addresses, headers, keys ------------------------------------------------------------------------------------------

ODD_LINES = {
    "a NUL in the rollout": "POST /r/r1%00/1/agents/main/v1/{path} HTTP/1.1",
    "a NUL in the agent's name": "POST /r/r1/1/agents/ma%00in/v1/{path} HTTP/1.1",
    "a raw NUL": "POST /r/r1\x00/1/agents/main/v1/{path} HTTP/1.1",
    "bytes that are no text": "POST /r/r1/1/agents/%ff%fe/v1/{path} HTTP/1.1",
    "raw bytes that are no text": "POST /r/r1/1/agents/\xff/v1/{path} HTTP/1.1",
    "a query that is not ASCII": "POST /r/r1/1/agents/main/v1/{path}?é=\xff HTTP/1.1",
    "a half surrogate": "POST /r/r1/1/agents/%ed%a0%80/v1/{path} HTTP/1.1",
    "a very long name": "POST /r/r1/1/agents/" + "a" * 30_000 + "/v1/{path} HTTP/1.1",
    "the host in the line": "POST http://x/r/r1/1/agents/main/v1/{path} HTTP/1.1",
}


@pytest.mark.parametrize("name", list(ODD_LINES))
async def test_odd_addresses(stand: Stand, name: str) -> None:
    stand.engine._script = lambda asked: "ok"
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt):
        for path, body in POSTS.items():
            async with connected(stand, attempt) as raw:
                data = json.dumps(body)
                head = f"host: localhost\r\nauthorization: Bearer {attempt.key}\r\ncontent-length: {len(data)}"
                line = ODD_LINES[name].replace("{path}", path)
                raw.writer.write(f"{line}\r\n{head}\r\n\r\n{data}".encode("latin-1"))
                status, _, answer = await raw.answer()
                assert status == 200 or 400 <= status < 500, answer
                assert status != 401 or error(path, answer)


@pytest.mark.parametrize(
    "headers",
    [
        ["content-type: text/plain", "content-type: application/json"],
        ["x-api-key: wrong", "x-api-key: \xff"],
        ["trace_id: nobody", "trace_id: "],
        ["x-strop-agent: \xe9\xff", "x-strop-agent: other"],
        ["accept: a/b", "accept: c/d", "anthropic-version: 1", "anthropic-version: 2"],
        ["cookie: a=b"] * 200,
        ["expect: 100-continue"],
    ],
)
async def test_repeated_and_odd_headers(stand: Stand, headers: list[str]) -> None:
    stand.engine._script = lambda asked: "ok"
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt):
        for path, body in POSTS.items():
            async with connected(stand, attempt) as raw:
                raw.post(path, body, *headers)
                if "100" in headers[0]:
                    assert b"100" in await raw.reader.readline()
                    await raw.reader.readline()
                assert (await raw.answer())[0] == 200


async def test_keys_of_nobody_and_of_another_rollout(stand: Stand) -> None:
    one, two = await stand.attempt("r1"), await stand.attempt("r2")
    async with unharmed(stand, one):
        for path, body in POSTS.items():
            for key in ("x", "\xff", one.key[:-1], one.key.upper(), two.key):
                status, _, answer = await ask(stand, one, path, body, key=key)
                assert (status, "does not open this attempt" in error(path, answer)) == (401, True)
    assert await events(stand, one) == [], "strangers write nothing into an attempt's record"
    found = await events(stand, two)
    assert [(event["status"], event["code"]) for event in found] == [(401, "invalid_api_key")] * len(POSTS)
    assert await stand.store.turns("r2") == []


# -- engines -----------------------------------------------------------------------------------------------------------

DEATHS: dict[str, Callable[[], Any]] = {
    "before the first token": lambda: EngineError("the engine is gone"),
    "in the middle": lambda: Breaks("one two", EngineError("the engine is gone")),
    "after the last token": lambda: Breaks(WORDS, EngineError("the engine is gone")),
    "by a mistake of its own": lambda: Breaks("one two", ZeroDivisionError("division by zero")),
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", list(DEATHS))
async def test_an_engine_that_dies(stand: Stand, path: str, stream: bool, when: str) -> None:
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt):
        stand.script(DEATHS[when]())
        status, _, body = await ask(stand, attempt, path, BODIES[path] | {"stream": stream})
    begun = stream and when != "before the first token"
    own = when == "by a mistake of its own"
    assert status == (200 if begun else 500 if own else 503)
    says = "an error of its own" if own else "the engine is gone"
    assert says in error(path, body)
    assert b"[DONE]" not in body
    (event,) = await events(stand, attempt)
    assert says in event["message"]
    turns = await stand.store.turns("r1")
    assert (turns[0].finish, len(turns)) == ("error", 1 + len(BODIES))


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_attempt_that_ends_before_its_answer_is_recorded(stand: Stand, path: str, stream: bool) -> None:
    attempt, other = await stand.attempt("r1"), await stand.attempt("r2")
    async with unharmed(stand, other):
        stand.engine._latency = 0.02
        stand.script(WORDS)
        asked = asyncio.create_task(ask(stand, attempt, path, BODIES[path] | {"stream": stream}))
        await asyncio.sleep(0.1)
        await stand.store.finish("r1", 1)
        status, _, body = await asked
        stand.engine._latency = 0.0
    assert status == (200 if stream else 409)
    assert "over" in error(path, body)
    assert await stand.store.turns("r1") == []
    assert ("r1", 1) not in stand.gateway.sessions


LONG = {"messages": {"max_tokens": 10**6}}

# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_at_any_moment(stand: Stand, path: str, stream: bool) -> None:
    attempt = await stand.attempt("r1")
    data = json.dumps(BODIES[path] | {"stream": stream}).encode()
    async with unharmed(stand, attempt):
        stand.engine._script, stand.engine._latency = lambda asked: WORDS, 0.01
        for stage in ("connected", "line", "head", "half", "sent", "waited", "first", "end"):
            async with connected(stand, attempt) as raw:
                if stage == "line":
                    raw.writer.write(b"POST /r/r1")
                elif stage != "connected":
                    raw.head(path, f"content-length: {len(data)}")
                    raw.writer.write(data[: {"head": 0, "half": 20}.get(stage, len(data))])
                if stage == "waited":
                    await asyncio.sleep(0.05)
                elif stage == "first" and stream:
                    await raw.reader.readuntil(b"data: ")
                elif stage == "end":
                    await raw.answer()
        await stand.gateway.wait_until_idle("r1", 1)
    turns = await stand.store.turns("r1")
    finished = [turn.finish for turn in turns if turn.answer["content"] != "fine"]
    assert finished.count("stop") == 1, finished
    assert set(finished) <= {"stop", "abandoned"}
    assert await events(stand, attempt) == [], "to leave is no error"


@pytest.mark.parametrize("path", APIS[1:])
async def test_a_client_that_stops_reading(renderer: Renderer, tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path / "g", renderer, Limits(deadline=1.0)) as stand:
        attempt = await stand.attempt("r1")
        stand.engine._context = 10**6
        async with unharmed(stand, attempt):
            route = stand.gateway.routes.find("main", None)
            endless = replace(route, sampling_for=lambda _: Sampling(max_tokens=10**6))
            stand.gateway.routes = Routes({"*": endless})
            stand.engine._script = lambda asked: "word " * 50_000
            async with connected(stand, attempt) as raw:
                raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
                raw.post(path, BODIES[path] | {"stream": True} | LONG.get(path, {}))
                await asyncio.sleep(2.5)
                (played,) = stand.engine.calls
                assert 0 < len(played.ids) < 50_000
        (event,) = await events(stand, attempt)
        assert event["code"] == "deadline_exceeded"
        assert (await stand.store.turns("r1"))[0].finish == "error"


@pytest.mark.parametrize("stream", [False, True])
async def test_replicas_keep_no_place_for_who_left_or_died(stand: Stand, stream: bool) -> None:
    stand.engine._script, stand.engine._latency = lambda asked: WORDS, 0.01
    replicas = Replicas([stand.engine, stand.engine])
    stand.gateway.routes = Routes({"*": replace(stand.gateway.routes.find("main", None), engine=replicas)})
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt):
        for path in APIS * 2:
            async with connected(stand, attempt) as raw:
                raw.post(path, BODIES[path] | {"stream": stream})
                await asyncio.sleep(0.05)
        stand.engine._script = lambda asked: Breaks("one two")
        for path in APIS:
            status, _, body = await ask(stand, attempt, path, BODIES[path] | {"stream": stream})
            assert status in (200, 503)
            assert error(path, body)
    assert [replica.in_flight for replica in replicas._replicas] == [0, 0]


# -- many --------------------------------------------------------------------------------------------------------------


async def storm(stand: Stand, attempt: Attempt, count: int) -> list[int]:
    """Good and bad requests of every API at once, some of whose clients leave."""

    async def one(number: int) -> int:
        path = APIS[number % 4]
        kind = number // 4 % 5
        if kind == 4:
            async with connected(stand, attempt) as raw:
                raw.post(path, BODIES[path] | {"stream": True})
                await asyncio.sleep(0.02)
            return 0
        body = [BODIES[path], BODIES[path] | {"stream": True}, b"{", BODIES[path] | {"tools": 5}][kind]
        status, _, answer = await ask(stand, attempt, path, body)
        assert status == (200 if kind < 2 else 400), answer
        return status

    return await asyncio.gather(*(one(number) for number in range(count)))


async def test_two_hundred_at_once(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    async with unharmed(stand, attempt):
        stand.engine._script, stand.engine._latency = lambda asked: WORDS, 0.001
        statuses = await storm(stand, attempt, 200)
    assert [statuses.count(status) for status in (0, 200, 400)] == [40, 80, 80]
    assert [event["status"] for event in await events(stand, attempt)] == [400] * 80
    turns = await stand.store.turns("r1")
    assert sum(turn.finish == "stop" for turn in turns) >= 80 + len(BODIES)
    assert len({turn.id for turn in turns}) == len(turns)


@pytest.mark.slow
async def test_nothing_grows(stand: Stand) -> None:
    """Round after round of everything above, each in a rollout of its own, as it is in a run."""
    stand.engine._script = lambda asked: WORDS
    held: list[int] = []
    tracemalloc.start()
    try:
        for number in range(8):
            attempt = await stand.attempt(f"r{number}")
            async with unharmed(stand, attempt):
                stand.engine._script = lambda asked: WORDS
                await storm(stand, attempt, 200)
                stand.script(*(DEATHS[when]() for when in list(DEATHS)[:3]))
                for _ in range(3):
                    await ask(stand, attempt, "messages", BODIES["messages"] | {"stream": True})
            await stand.store.finish(attempt.rollout, 1)
            stand.gateway.forget(attempt.rollout)
            stand.engine.calls.clear()
            conversation._known.clear()  # it has a bound of its own
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(stand.gateway.sessions) == 0
    assert held[-1] - held[3] < 512 << 10, held
