"""Heads of answers go out with what follows them, and never wait for it longer than a turn of the loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message, Receive, Scope, Send

from strop.net.client import Client
from strop.net.joined_head import MAX_COPIED, JoinedHead
from strop.net.server import serve

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
Talk = Callable[[Send], Awaitable[None]]


@asynccontextmanager
async def serving(talk: Talk) -> AsyncIterator[Client]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await talk(send)

    server = await serve(app)
    client = Client(server.url)
    try:
        yield client
    finally:
        await client.close()
        await server.close()


class Written(asyncio.Transport):
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_a_head_goes_with_its_body():
    under = Written()
    joined = JoinedHead(under, asyncio.get_running_loop())
    joined.write(b"head ")
    assert under.pieces == []
    joined.write(b"body")
    joined.write(b"more")
    await asyncio.sleep(0)
    assert under.pieces == [b"head body", b"more"]


async def test_a_head_that_nothing_follows_goes_at_the_end_of_the_turn():
    under = Written()
    joined = JoinedHead(under, asyncio.get_running_loop())
    joined.write(b"head")
    await asyncio.sleep(0)
    assert under.pieces == [b"head"]
    joined.write(b"body")
    assert under.pieces == [b"head", b"body"]


@pytest.mark.parametrize("body", [b"", b"x" * (MAX_COPIED + 1)], ids=["nothing", "much"])
async def test_a_head_comes_before_whatever_follows(body: bytes):
    under = Written()
    joined = JoinedHead(under, asyncio.get_running_loop())
    joined.write(b"head")
    if body:
        joined.write(body)
    joined.close()
    assert b"".join(under.pieces) == b"head" + body
    assert joined.is_closing()
    await asyncio.sleep(0)  # nothing is written to what is closed


async def test_a_streams_head_comes_before_its_first_piece():
    seen = asyncio.Event()

    async def talk(send: Send) -> None:
        await send(START)
        await seen.wait()
        for n in range(3):
            await send({"type": "http.response.body", "body": b"%d" % n, "more_body": n < 2})

    async with serving(talk) as client, asyncio.timeout(60), client.stream("GET", "/") as streamed:
        assert streamed.status == 200
        seen.set()
        assert b"".join([piece async for piece in streamed]) == b"012"


async def test_answers_without_a_body():
    async def talk(send: Send) -> None:
        await send({**START, "headers": [(b"content-length", b"0"), (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(talk) as client:
        for method in ("GET", "HEAD", "POST"):
            answer = await client.request(method, "/", timeout=60)
            assert (answer.status, answer.body) == (200, b"")
