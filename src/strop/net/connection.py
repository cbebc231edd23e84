"""One HTTP/1.1 connection of a client: its parser, and who waits for what it reads (`strop.net.client` has the client).

It carries one request at a time. An answer is given whole, or head first and its body piece by piece: then no more is
read from the socket than is taken, but for a little.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from typing import cast

import httptools
from msgspec import Struct

MAX_HELD = 256 << 10
"""Bytes of a streamed body that are read ahead of the reader."""


class Lost(ConnectionError):
    """The connection ended before a byte of an answer came: nobody knows whether the request was carried out."""


class Broken(ConnectionError):
    """An answer began but cannot be used."""


class TooLarge(Broken):
    """An answer that would never fit: asking again does not help."""


class Response(Struct, frozen=True):
    """Header names are in lower case; a header that came twice is joined by ", "."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One connection and its parser. It carries one request at a time."""

    def __init__(self, url: str, max_answer: int, forget: Callable[[Connection], None]) -> None:
        self.gone = asyncio.get_running_loop().create_future()
        self._url = url
        self._max_answer = max_answer
        self._forget = forget
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Response] | None = None
        self._pieces: asyncio.Queue[bytes | Exception | None] | None = None  # of a body that is streamed
        self._held = 0
        self._head = False
        self._keep = True
        self._size = 0
        self._reset()

    async def ask(self, message: bytes, head: bool) -> Response:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self._head = head
        self._size = 0
        try:
            if self._transport.is_closing():
                raise Lost(f"{self._url} closed the connection")
            self._transport.write(message)
            return await waiter
        except BaseException:  # nobody waits for the rest, and the next request must not get it
            self._waiter = self._pieces = None
            self.abort()
            raise

    async def begin(self, message: bytes) -> tuple[Response, AsyncGenerator[bytes]]:
        """The head of an answer, and the pieces of its body."""
        self._pieces = pieces = asyncio.Queue[bytes | Exception | None]()
        self._held = 0
        return await self.ask(message, head=False), self._take_pieces(pieces)

    async def _take_pieces(self, pieces: asyncio.Queue[bytes | Exception | None]) -> AsyncGenerator[bytes]:
        while (piece := await pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            self._held -= len(piece)
            if self._held <= MAX_HELD and not self._transport.is_closing():
                self._transport.resume_reading()
            yield piece

    @property
    def reusable(self) -> bool:
        """Not closing, and neither side has anything left to say: a server may answer before it has read a request."""
        idle = self._pieces is None and not self._transport.get_write_buffer_size()
        return self._keep and idle and self._held <= MAX_HELD and not self._transport.is_closing()

    def abort(self) -> None:
        self._keep = False
        self._transport.abort()

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None and self._pieces is None:  # an answer to nothing
            return self.abort()
        self._size += len(data)
        if self._size > self._max_answer and self._waiter is not None:
            return self._fail(TooLarge(f"the answer of {self._url} is larger than {self._max_answer} bytes"))
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self._fail(Broken(f"the answer of {self._url} is not HTTP/1.1: {error}"))
        if self._head and self._complete:  # the parser waits for the body that its headers announce
            self._keep = False
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._complete and not self._has_length():  # the end of the connection is the body's end
            self._finish()
        how = "closed the connection" if exc is None else f"is gone ({explain(exc)})"
        if self._size == 0:
            self._fail(Lost(f"{self._url} {how} before it answered"))
        else:
            self._fail(Broken(f"{self._url} {how} in the middle of its answer"))
        self._forget(self)
        self.gone.set_result(None)

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reset()
        if self._waiter is None and self._pieces is None:  # more than one answer to one request
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._complete:  # a trailer after the last chunk
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._complete = self._status >= 200
        self._keep = self._parser.should_keep_alive()
        if self._complete and self._pieces is not None:
            self._deliver()

    def on_body(self, body: bytes) -> None:
        if self._pieces is None:
            return self._body.append(body)
        self._pieces.put_nowait(body)
        self._held += len(body)
        if self._held > MAX_HELD and not self._transport.is_closing():
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._complete:  # not 100 Continue and its like, which announce the real answer
            self._finish()

    # ------------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._status = 0
        self._complete = False
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def _has_length(self) -> bool:
        return "content-length" in self._headers or "transfer-encoding" in self._headers

    def _finish(self) -> None:
        """The body is whole."""
        if self._pieces is None:
            return self._deliver()
        self._pieces.put_nowait(None)
        self._pieces = None

    def _deliver(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Response(self._status, self._headers, b"".join(self._body)))
        self._waiter = None

    def _fail(self, error: ConnectionError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        if self._pieces is not None:
            self._pieces.put_nowait(error)
        self._waiter = self._pieces = None
        self.abort()


def explain(error: Exception) -> str:
    if isinstance(error, ConnectionError) and error.errno:  # asyncio writes its own text over the system's
        return os.strerror(error.errno)
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
