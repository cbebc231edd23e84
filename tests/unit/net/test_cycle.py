"""How an answer leaves, and how an app hears that its client has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from strop.net import server as net_server
from strop.net.asgi import answer, read_body
from strop.net.bounds import Bounded
from strop.net.cycle import answer_at_once, take_body, watch_disconnect
from strop.net.server import serve
from tests.limits import stretch

App = Callable[[Any, Any, Any], Awaitable[None]]
ASK = b"POST /a%20b?c=1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nhi"


@asynccontextmanager
async def asked(app: App) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of this app."""
    server = await serve(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.close()


async def test_head_and_body_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    made = Bounded.connection_made

    def connection_made(self: Bounded, transport: asyncio.Transport) -> None:
        class Watched:
            def write(self, data: bytes) -> None:
                writes.append(data)
                transport.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

        made(self, Watched())  # type: ignore[arg-type]

    monkeypatch.setattr(Bounded, "connection_made", connection_made)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=1")
        await answer(send, await read_body(receive) * 3)

    async with asked(app) as (reader, writer):
        for _ in range(2):
            writer.write(ASK)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 6\r\n" in head
            assert await reader.readexactly(6) == b"hihihi"
    assert [data[-6:] for data in writes] == [b"hihihi"] * 2


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    more = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await more.wait()
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async with asked(app) as (reader, writer):
        writer.write(ASK)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        more.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_what_is_there_is_taken_and_answered_at_once() -> None:
    """A body that is not there whole is waited for, as ever."""
    taken: list[bytes | None] = []
    waits = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        taken.append(body := take_body(receive))
        if body is None:
            waits.set()
            body = await read_body(receive)
        headers = [(b"content-length", b"%d" % len(body))]
        assert answer_at_once(send, headers, body)
        assert not answer_at_once(send, headers, body), "once"

    async with asked(app) as (reader, writer):
        for pieces in ([ASK], [ASK[:-1], b"i"], [ASK]):
            waits.clear()
            writer.write(pieces[0])
            if len(pieces) > 1:
                await waits.wait()
                writer.write(pieces[1])
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(2) == b"hi"
    assert taken == [b"hi", None, b"hi"]


async def test_an_app_behind_another_server_waits() -> None:
    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    assert take_body(receive) is None
    assert not answer_at_once(send, [], b"")


async def test_hanging_up_is_told_after_a_body_was_taken() -> None:
    gone, began = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert take_body(receive) == b"hi"
        watch_disconnect(receive, gone.set)
        began.set()
        await gone.wait()

    async with asked(app) as (_, writer):
        writer.write(ASK)
        await began.wait()
        assert not gone.is_set()
        writer.close()
        await asyncio.wait_for(gone.wait(), stretch(10))


async def test_requests_in_one_go_are_answered_in_order() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        await answer(send, scope["path"].encode())

    async with asked(app) as (reader, writer):
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % number for number in range(3)))
        for number in range(3):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"/%d" % number


async def test_hanging_up_is_told_once_it_is_watched() -> None:
    """Also after a body so large that reading was paused for it."""
    gone, began = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        watch_disconnect(receive, gone.set)
        began.set()
        await gone.wait()

    async with asked(app) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n" + bytes(300_000))
        await began.wait()
        assert not gone.is_set()
        writer.close()
        await asyncio.wait_for(gone.wait(), stretch(10))


async def test_an_idle_connection_is_closed_and_one_at_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_server, "IDLE", 0.2)
    more = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await more.wait()
        await answer(send, b"{}")

    async with asked(app) as (reader, writer):
        writer.write(ASK)
        await asyncio.sleep(1.5)  # longer than an idle one may last
        more.set()
        await reader.readuntil(b"{}")
        assert await asyncio.wait_for(reader.read(), stretch(10)) == b""


@pytest.mark.parametrize(("name", "value"), [(b"x-a", b"b\r\nx-c: d"), (b"x a", b"b")])
async def test_headers_that_are_none_are_not_sent(name: bytes, value: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"{}", headers=[(name, value)])

    async with asked(app) as (reader, writer):
        writer.write(ASK)
        assert b"x-c" not in await reader.read(1000)
