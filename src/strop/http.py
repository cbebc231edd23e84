"""A small HTTP/1.1 client on asyncio and httptools, for the calls that Strop's own parts make to each other.

    request ──▶ a kept-alive connection, or a fresh one ──▶ one message out, one `Answer` back ──▶ kept for the next
    stream  ──▶ the same, but the answer's body is read piece by piece as it comes

It does what those calls need and costs little: a protocol instead of streams, one parser per connection, what stands in
every request encoded once. Left out on purpose: redirects, cookies, proxies, compression, streaming of requests, and a
limit on connections (whoever calls decides how many requests run at once).

When no answer comes, the error says how far it got, since that decides whether a request may be sent again:

    Unreachable   nothing was sent: no connection
    Lost          sent, and the connection ended before a byte of an answer came
    Broken        an answer began, but it was cut off, too large, or no HTTP
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

from strop.errors import ConfigError

MAX_ANSWER = 64 << 20
"""Bytes of one answer, as they come over the wire."""
MAX_IDLE = 4.0
"""Seconds a connection is kept without a request. Servers close theirs after 5 s or later, and a request sent at that
very moment would be lost."""

MAX_HELD = 256 << 10
"""Bytes of a streamed body that are read ahead of whoever takes them."""
LONGEST_WAIT = 60.0

_REQUEST = re.compile(r"[A-Z]+ /[!-~]*")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "expect", "upgrade"})
_NONE: Mapping[str, str] = MappingProxyType({})


class Unreachable(ConnectionError):
    """No connection could be made: the server has seen nothing of the request."""


class Lost(ConnectionError):
    """The connection ended before a byte of an answer came: nobody knows whether the request was carried out."""


class Broken(ConnectionError):
    """An answer began but cannot be used."""


class TooLarge(Broken):
    """An answer that would never fit: asking again does not help."""


class Answer(Struct, frozen=True):
    """Header names are in lower case; a header that came twice is joined by ", "."""

    status: int
    headers: dict[str, str]
    body: bytes


class Streamed:
    """An answer whose body is on its way: `async for piece in streamed`. Raises `Broken` if it is cut off."""

    def __init__(self, head: Answer, pieces: AsyncGenerator[bytes]) -> None:
        self.status, self.headers = head.status, head.headers
        self._pieces = pieces

    def __aiter__(self) -> AsyncGenerator[bytes]:
        return self._pieces


class Client:
    """Requests to one server, from one event loop. `key` goes out as a bearer token; the path of `url` comes first in
    every request's path.

        client = Client("https://store.example:8443/v1", key="secret")
        answer = await client.request("POST", "/lease", b"{}", headers={"content-type": "application/json"}, timeout=30)
        ...
        await client.close()
    """

    def __init__(
        self, url: str, *, key: str | None = None, connect_timeout: float = 10.0, max_answer: int = MAX_ANSWER
    ) -> None:
        place = parse(url)
        self.url = url
        self._host, self._port, self._ssl = place.host, place.port, place.secure
        self._prefix = place.path.rstrip("/")
        self._connect_timeout = connect_timeout
        self._max_answer = max_answer
        always = {"accept-encoding": "identity"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        self._always = f"host: {place.netloc}\r\n".encode() + _encode(always)
        self._idle: dict[_Connection, float] = {}  # since when; the one used last is taken first
        self._open: set[_Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = _NONE,
        timeout: float | None = None,
        again: bool = False,
    ) -> Answer:
        """Any answer, whatever its status. Raises `Unreachable`, `Lost`, `Broken`, or `TimeoutError` after `timeout`
        seconds.

        A kept-alive connection may turn out to be closed by the server only when a request was sent on it. GET and HEAD
        are then sent once more on a fresh one, others only if the caller says that they may arrive twice (`again`).
        """
        message = self._message(method, path, body, headers)
        try:
            async with asyncio.timeout(timeout):
                return await self._exchange(message, method == "HEAD", again or method in ("GET", "HEAD"))
        except TimeoutError:
            raise TimeoutError(f"{self.url} gave no answer to {method} {path} within {timeout:g} s") from None

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = _NONE,
        timeout: float | None = None,
    ) -> AsyncGenerator[Streamed]:
        """The same, once the answer's head has come, which may take `timeout` seconds. The body is not limited in size
        and is taken as it comes; leaving the block before its end closes the connection. Nothing is sent twice."""
        message = self._message(method, path, body, headers)
        try:
            async with asyncio.timeout(timeout):
                connection = self._take() or await self._connect()
                head, pieces = await connection.begin(message)
        except TimeoutError:
            raise TimeoutError(f"{self.url} gave no answer to {method} {path} within {timeout:g} s") from None
        try:
            yield Streamed(head, pieces)
        finally:
            self._keep(connection)

    async def close(self) -> None:
        """Close every connection. Requests in flight end as `Lost` or `Broken`."""
        self._closed = True
        while self._open:
            for connection in self._open:
                connection.abort()
            await asyncio.wait([connection.gone for connection in self._open])

    def _message(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        line = f"{method} {self._prefix}{path}"
        if not _REQUEST.fullmatch(line):
            raise ValueError(f"{line!r} cannot be requested: the path begins with / and is percent-encoded ASCII")
        parts = [line.encode(), b" HTTP/1.1\r\n", self._always, _encode(headers)]
        if body or method not in ("GET", "HEAD"):
            parts.append(b"content-length: %d\r\n" % len(body))
        return b"".join([*parts, b"\r\n", body])

    async def _exchange(self, message: bytes, head: bool, again: bool) -> Answer:
        if (connection := self._take()) is not None:
            try:
                return await self._ask(connection, message, head)
            except Lost:
                if not again:
                    raise
        return await self._ask(await self._connect(), message, head)

    async def _ask(self, connection: _Connection, message: bytes, head: bool) -> Answer:
        answer = await connection.ask(message, head)
        self._keep(connection)
        return answer

    def _keep(self, connection: _Connection) -> None:
        if connection.reusable:
            self._idle[connection] = asyncio.get_running_loop().time()
        else:
            connection.abort()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection, since = self._idle.popitem()
            if asyncio.get_running_loop().time() - since > MAX_IDLE:  # and so are all below it
                for old in (connection, *self._idle):
                    old.abort()
                self._idle.clear()
            elif connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self._closed:
            raise Unreachable(f"the client for {self.url} was closed")
        loop = asyncio.get_running_loop()
        secure = ssl_context() if self._ssl else None
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self.url, self._max_answer, self._forget), self._host, self._port, ssl=secure
                )
        except TimeoutError:
            raise Unreachable(f"{self.url} took no connection within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"{self.url} cannot be reached: {_reason(error)}") from None
        self._open.add(connection)
        if self._closed:  # while this one was on its way
            connection.abort()
        return connection

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class _Connection(asyncio.Protocol):
    """One connection and its parser. It carries one request at a time."""

    def __init__(self, url: str, max_answer: int, forget: Callable[[_Connection], None]) -> None:
        self.gone = asyncio.get_running_loop().create_future()
        self._url = url
        self._max_answer = max_answer
        self._forget = forget
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._pieces: asyncio.Queue[bytes | Exception | None] | None = None  # of a body that is streamed
        self._held = 0
        self._head = False
        self._keep = True
        self._size = 0
        self._began()

    async def ask(self, message: bytes, head: bool) -> Answer:
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

    async def begin(self, message: bytes) -> tuple[Answer, AsyncGenerator[bytes]]:
        """The head of an answer, and the pieces of its body."""
        self._pieces = pieces = asyncio.Queue[bytes | Exception | None]()
        self._held = 0
        return await self.ask(message, head=False), self._taken(pieces)

    async def _taken(self, pieces: asyncio.Queue[bytes | Exception | None]) -> AsyncGenerator[bytes]:
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
        return self._keep and idle and not self._transport.is_closing()

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
            return self._fail(Broken(f"the answer of {self._url} is no HTTP/1.1: {error}"))
        if self._head and self._complete:  # the parser waits for the body that its headers announce
            self._keep = False
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._complete and not self._framed():  # the end of the connection is the body's end
            self._finish()
        how = "closed the connection" if exc is None else f"is gone ({_reason(exc)})"
        if self._size == 0:
            self._fail(Lost(f"{self._url} {how} before it answered"))
        else:
            self._fail(Broken(f"{self._url} {how} in the middle of its answer"))
        self._forget(self)
        self.gone.set_result(None)

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._began()
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

    def _began(self) -> None:
        self._status = 0
        self._complete = False
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def _framed(self) -> bool:
        return "content-length" in self._headers or "transfer-encoding" in self._headers

    def _finish(self) -> None:
        """The body is whole."""
        if self._pieces is None:
            return self._deliver()
        self._pieces.put_nowait(None)
        self._pieces = None

    def _deliver(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(self._status, self._headers, b"".join(self._body)))
        self._waiter = None

    def _fail(self, error: ConnectionError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        if self._pieces is not None:
            self._pieces.put_nowait(error)
        self._waiter = self._pieces = None
        self.abort()


class Place(Struct, frozen=True):
    """The parts of a server's address."""

    secure: bool
    host: str
    port: int
    netloc: str
    path: str


def parse(url: str) -> Place:
    """
    >>> parse("https://[::1]:8443/v1")
    Place(secure=True, host='::1', port=8443, netloc='[::1]:8443', path='/v1')
    """
    wrong = None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        wrong = "write http://HOST:PORT or https://HOST:PORT"
    elif not re.fullmatch("[!-~]+", url):
        wrong = "percent-encode what is not printable ASCII"
    elif "@" in parts.netloc:
        wrong = "leave out the user and password"
    elif parts.query or parts.fragment:
        wrong = "leave out everything from ? or # on"
    if wrong:
        raise ConfigError(f"{url!r} is no address of a server: {wrong}")
    secure = parts.scheme == "https"
    return Place(secure, str(parts.hostname), port or (443 if secure else 80), parts.netloc, parts.path)


def retry_after(value: str) -> float:
    """Seconds that a server asks to be left alone for, given as such or as a date; 0 if nobody knows.

    >>> retry_after("2"), retry_after("soon"), retry_after("100000")
    (2.0, 0.0, 60.0)
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT) if seconds == seconds else 0.0


@lru_cache(maxsize=1)
def ssl_context() -> ssl.SSLContext:
    """Reading the certificates takes tens of milliseconds: once per process is enough."""
    return ssl.create_default_context()


def _encode(headers: Mapping[str, str]) -> bytes:
    lines: list[str] = []
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} cannot be sent: a line break or another odd character is in it")
        if name.lower() in _OURS:
            raise ValueError(f"header {name!r} is the client's own: leave it out")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionError) and error.errno:  # asyncio writes its own text over the system's
        return os.strerror(error.errno)
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
