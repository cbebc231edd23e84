"""How the OpenAI clients of agents reach the gateway: kept-alive HTTP/1.1 connections to one server.

    GatewayTransport        for threads: a blocking socket and httptools
    AsyncGatewayTransport   for an event loop, on strop.net.client

They stand in for the connection pools of httpx, in clients that `openai_clients` makes, for http:// addresses of the
gateway only. Timeouts and errors are those that httpx has, so that the `openai` package does with them what it does: it
tries again where that is safe.

Left out: TLS, proxies, HTTP/2 and every other server, for which httpx's own transports stay in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING

import httptools
import openai

from strop.net.client import MAX_IDLE, Broken, Client, Lost, StreamedResponse, Unreachable

if TYPE_CHECKING:
    import httpx2 as httpx
else:  # the one that the openai package is built on, which is httpx2 since its version 3
    httpx = sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]

PIECE = 1 << 16
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
CLIENTS_OWN = FRAMING | {b"host", b"connection", b"accept-encoding"}
"""Headers that `strop.net.client` writes itself."""


class GatewayTransport(httpx.BaseTransport):
    """Connections to `host`, from any thread. A connection carries one request at a time, and is kept for the next."""

    def __init__(self, host: str, port: int) -> None:
        self._place = (host, port)
        self._idle: list[_Connection] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits: dict[str, float | None] = request.extensions.get("timeout", {})
        message = _write(request)
        connection = self._take() or self._connect(limits.get("connect"))
        try:
            with _errors_of_httpx(httpx.WriteTimeout, httpx.WriteError):
                connection.socket.settimeout(limits.get("write"))
                connection.socket.sendall(message)
            with _errors_of_httpx(httpx.ReadTimeout, httpx.ReadError):
                connection.socket.settimeout(limits.get("read"))
                status, headers = connection.read_head()
        except BaseException:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(connection, self._idle))

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:  # an agent's client is hardly ever closed
        self.close()

    def _take(self) -> _Connection | None:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last
                connection = self._idle.pop()
                if connection.is_fresh():
                    return connection
                connection.close()
        return None

    def _connect(self, limit: float | None) -> _Connection:
        with _errors_of_httpx(httpx.ConnectTimeout, httpx.ConnectError):
            return _Connection(socket.create_connection(self._place, limit))


class _Connection:
    """One connection and its parser."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._parser = httptools.HttpResponseParser(self)
        self._used = 0.0
        self._reset()

    def read_head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers of the answer to what was sent."""
        self._reset()
        while not self._has_head:
            self._read()
        return self._parser.get_status_code(), self._headers

    def read_body(self) -> Iterator[bytes]:
        while True:
            yield from self._pieces
            self._pieces.clear()
            if self.is_whole:
                return
            self._read()

    def is_fresh(self) -> bool:
        """Kept for no longer than servers do, and silent: what can be read is the end, or answers nothing."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return time.monotonic() - self._used < MAX_IDLE and not poll.poll(0)

    def may_be_kept(self) -> bool:
        self._used = time.monotonic()
        return self.is_whole and self._keep

    def close(self) -> None:
        self.socket.close()

    def _reset(self) -> None:
        self.is_whole = self._has_head = self._keep = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []

    def _read(self) -> None:
        data = self.socket.recv(PIECE)
        if not data:
            # Without a length the end of the connection is the end of the body.
            lengths = {name.lower() for name, _ in self._headers} & {b"content-length", b"transfer-encoding"}
            if not self._has_head or lengths:
                raise httpx.RemoteProtocolError("the gateway closed the connection before its answer was whole")
            self.is_whole = True
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise httpx.RemoteProtocolError(f"the gateway's answer is not HTTP/1.1: {error}") from error

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # or it is a trailer after the last chunk
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = self._parser.get_status_code() >= 200
        self._keep = self._parser.should_keep_alive()
        if not self._has_head:  # 100 Continue and its like, which announce the real answer
            self._headers = []

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = self._has_head


class _Body(httpx.SyncByteStream):
    """The body of an answer. Read to its end, it gives its connection back."""

    def __init__(self, connection: _Connection, idle: list[_Connection]) -> None:
        self._connection, self._idle = connection, idle

    def __iter__(self) -> Iterator[bytes]:
        with _errors_of_httpx(httpx.ReadTimeout, httpx.ReadError):
            yield from self._connection.read_body()

    def close(self) -> None:
        if self._connection.may_be_kept():
            self._idle.append(self._connection)
        else:
            self._connection.close()


def _write(request: httpx.Request) -> bytes:
    """The request as it is sent: whole, so with the length of its body."""
    body = request.read()
    given = [(name, value) for name, value in request.headers.raw if name.lower() not in FRAMING]
    if any(b"\r" in value or b"\n" in value for _, value in given):
        raise httpx.LocalProtocolError("a header has a line break in it. Fix: leave that out")
    lines = [b"%s: %s\r\n" % header for header in (*given, (b"Content-Length", b"%d" % len(body)))]
    return b"".join([request.method.encode(), b" ", request.url.raw_path, b" HTTP/1.1\r\n", *lines, b"\r\n", body])


@contextmanager
def _errors_of_httpx(late: type[httpx.HTTPError], broken: type[httpx.HTTPError]) -> Generator[None]:
    """Errors of sockets, under the names that users of httpx know."""
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise broken(str(error)) from error


# -- event loops -------------------------------------------------------------------------------------------------------


class AsyncGatewayTransport(httpx.AsyncBaseTransport):
    """Connections to the server at `url`, of the event loop that it is used in. `other` is for loops that are not
    asyncio's."""

    def __init__(self, url: str, other: httpx.AsyncBaseTransport) -> None:
        self._url = url
        self._other = other
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return await self._other.handle_async_request(request)
        if self._client is None or self._loop is not loop:
            self._client, self._loop = Client(self._url), loop
        limits: dict[str, float | None] = request.extensions.get("timeout", {})
        path, body = request.url.raw_path.decode("ascii"), await request.aread()
        headers = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in request.headers.raw
            if name.lower() not in CLIENTS_OWN
        }
        streaming = self._client.stream(request.method, path, body, headers=headers, timeout=limits.get("read"))
        with _errors_of_client():
            answer = await streaming.__aenter__()
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_AsyncBody(streaming, answer, limits.get("read"))
        )

    async def aclose(self) -> None:
        await self._other.aclose()
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.close()
            self._client = None


class _AsyncBody(httpx.AsyncByteStream):
    """The body of an answer. Read to its end, it gives its connection back."""

    def __init__(
        self,
        streaming: AbstractAsyncContextManager[StreamedResponse],
        answer: StreamedResponse,
        limit: float | None,
    ) -> None:
        self._streaming, self._answer, self._limit = streaming, answer, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._answer)
        with _errors_of_client():
            while True:
                async with asyncio.timeout(self._limit):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece

    async def aclose(self) -> None:
        await self._streaming.__aexit__(None, None, None)


@contextmanager
def _errors_of_client() -> Generator[None]:
    try:
        yield
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except Unreachable as error:
        raise httpx.ConnectError(str(error)) from error
    except (Lost, Broken) as error:
        raise httpx.RemoteProtocolError(str(error)) from error
