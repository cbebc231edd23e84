"""What a stranger can make a server keep, bounded for every connection before any key is seen.

    head   its line and headers: in size and in time
    body   in time, at a rate that no real connection falls below; how large it may be is for the app to say
    answered before the body was there (no key, no such address): the rest is not waited for
    connections   those that ask for nothing give way to new ones, the longest idle first

A client that trickles thousands of requests so costs others nothing.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from strop.net.cycle import RequestCycle

MAX_HEAD = 64 << 10
"""Bytes a request's head may take (and one read of the socket more)."""
HEAD_TIME = 30.0
"""Seconds until a connection's first request, and a request that has begun, must have shown its whole head."""
BODY_TIME = 30.0
"""Seconds that a body may take, and one more for every `BODY_RATE` bytes of it."""
BODY_RATE = 16 << 10
LEAVE_TIME = 3.0
"""Seconds that a client which was answered too early gets to read that: closed at once, it might never see it."""
LEAVE_SIZE = 16 << 20
"""Bytes that it may send meanwhile."""
CLOSE_TIME = 30.0
"""Seconds that a client gets to take what it was sent once its connection is being closed."""
MAX_CONNECTIONS = 16_384
FILES_SHARE = 0.75
"""How much of the files that a process may have open its clients may take."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Bounded(HttpToolsProtocol):
    """A connection that is closed if it sends too much of what is not a body, or too slowly."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        now = self.loop.time()
        self._size = 0  # of what the parser holds until a head, a piece of a body or a trailer is complete
        self._between = False
        self._closing_since: float | None = None
        self._head_since: float | None = now  # when a head was begun that is not complete
        self._body_since: float | None = None  # the same of a body, of which `_received` bytes are there
        self._received = 0
        self._closes = False  # the client wants no other request after this one
        self._leaving_since: float | None = None  # all was said from our side
        self._idle_since: float | None = now  # nothing has been asked that is not answered
        self._drop_idle()

    def data_received(self, data: bytes) -> None:
        if self._leaving_since is not None:
            self._size += len(data)
            if self._size > LEAVE_SIZE:
                self.transport.abort()
            return
        if self._between and self._head_since is None:
            self._head_since = self.loop.time()
        self._size += len(data)
        super().data_received(data)
        if self._size > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.cycle is not None:  # pyright: ignore[reportUnnecessaryComparison]
            cast(RequestCycle, self.cycle).tell_disconnect()

    def on_headers_complete(self) -> None:
        self._size, self._between, self._head_since = 0, False, None
        self._body_since, self._received = self.loop.time(), 0
        self._begin_cycle()
        # Answered before its body is there, a client that asked to close would be cut off before it reads the answer.
        self._closes, self.cycle.keep_alive = not self.cycle.keep_alive, True

    def on_body(self, body: bytes) -> None:
        self._size = 0
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._size, self._between, self._body_since, self._idle_since = 0, True, None, None
        self.cycle.keep_alive &= not self._closes
        super().on_message_complete()

    def _begin_cycle(self) -> None:
        """As uvicorn does it, for an app at the root and without websockets."""
        parser, scope, before = cast(httptools.HttpRequestParser, self.parser), self.scope, self.cycle
        app = cast(Any, self.app)  # pyright: ignore[reportUnknownMemberType]
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        version = parser.get_http_version()
        scope["method"], scope["http_version"] = parser.get_method().decode("ascii"), version
        scope["path"], scope["raw_path"] = unquote(path) if "%" in path else path, url.path
        scope["query_string"] = url.query or b""
        self.cycle = RequestCycle(
            self.loop,
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._start_asgi_task(self.cycle, app)
        else:  # requests that come before the last one is answered wait for that
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, app))

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        if self.cycle.response_complete:  # and no other request comes after it
            self._idle_since = self._idle_since or self.loop.time()
            if self._body_since is not None and not self.transport.is_closing():
                self._leave()

    def check_time(self) -> None:
        now = self.loop.time()
        if self.transport.is_closing():  # as soon as the client has taken what it was sent
            self._closing_since = self._closing_since or now
            if now - self._closing_since > CLOSE_TIME:
                self.transport.abort()
        elif self._leaving_since is not None:
            if now - self._leaving_since > LEAVE_TIME:
                self.transport.abort()
        elif self._head_since is not None:
            if now - self._head_since > HEAD_TIME:
                self.transport.close()
        elif self._body_since is not None:
            late = now - self._body_since > BODY_TIME + self._received / BODY_RATE and not self.flow.read_paused
            if late and not self.cycle.response_started:
                self.transport.write(TOO_SLOW)
            if late:
                self.transport.close()
        elif self._idle_since is not None and now - self._idle_since > self.timeout_keep_alive:
            self.transport.close()

    def _leave(self) -> None:
        """Say that no more is coming, and take no notice of what still comes until the client has read that."""
        self._leaving_since, self._size = self.loop.time(), 0
        with suppress(OSError):
            self.transport.write_eof()

    def _drop_idle(self) -> None:
        """A new connection may be a good client's: one that asks for nothing goes for it."""
        others = cast("set[Bounded]", self.connections)
        if len(others) > most_connections():
            idle = [one for one in others if one._idle_since is not None and one is not self]
            if idle:
                min(idle, key=lambda one: one._idle_since or 0.0).transport.abort()


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, int(soft * FILES_SHARE))
