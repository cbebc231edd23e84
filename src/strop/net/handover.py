"""One address, several processes: a connection goes to the process that a request of it is for.

    client ──▶ the process that listens ──reads a request's head──▶ Switch.find: whose is it?
                   │ its own: answered here
                   └ another's: the open connection goes there, with what was read of it

A connection is looked at wherever a request on it begins, so one that asks for something else later moves on then.
Answers do not pass through the processes that a connection came by.

Left out: requests that are sent before the one before them is answered (pipelining). Such a connection is closed after
that answer, and its client asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from strop.net.bounds import MAX_HEAD, Bounded

PACKET = 32 << 10
"""Bytes of a connection's data that are sent at once."""
BUSY = 0.01
"""Seconds until more is sent where too many connections are on their way."""
MORE, LAST = b"\0", b"\1"


class Switch(ABC):
    """Who answers a request. Processes have numbers; `own` is this one's, and `take` has its server serve a connection
    that another one handed over."""

    own: int
    take: Callable[[socket.socket, bytes], None]

    @abstractmethod
    def find(self, head: bytes) -> int | Awaitable[int] | None:
        """The process that a request is for by its first bytes; None if more of them are needed."""

    @abstractmethod
    def hand_over(self, place: int, fd: int, data: bytes) -> None:
        """Give a connection, of which `data` was read, to another process. `fd` is a copy that is closed by this."""


class Routed(Bounded):
    """A connection that moves on if it is not for this process. `first` is what was read of it elsewhere."""

    def __init__(self, *args: Any, switch: Switch, first: bytes = b"", **more: Any) -> None:
        super().__init__(*args, **more)
        self._switch, self._first = switch, first
        self._held = b""  # of a head, until it shows who it is for
        self._admitted = False  # the request that is being read is ours
        self._finding: asyncio.Future[int] | None = None
        self._ignores = False  # what comes after the present request

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self._first:
            first, self._first = self._first, b""
            self.data_received(first)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            return super().data_received(data)
        if self._ignores:
            return
        if self._is_answering():
            return self._ignore_more()
        self._held = (self._held + data).lstrip(b"\r\n")  # parsers skip empty lines before a request
        if not self._held:
            return
        self._head_since = self._head_since or self.loop.time()
        if self._finding is None:
            self._route()

    def _route(self) -> None:
        found = self._switch.find(self._held)
        if found is None:
            if len(self._held) > MAX_HEAD:  # it is refused as every such head is
                self._admit()
        elif isinstance(found, int):
            self._settle(found)
        else:
            self.transport.pause_reading()
            self._finding = finding = asyncio.ensure_future(found)
            finding.add_done_callback(self._found)

    def _found(self, finding: asyncio.Future[int]) -> None:
        self._finding = None
        lost = finding.cancelled() or finding.exception() is not None  # then it is refused here
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._settle(self._switch.own if lost else finding.result())

    def _settle(self, place: int) -> None:
        if place == self._switch.own:
            return self._admit()
        if self.transport.get_write_buffer_size():  # the answer before is not taken yet
            self._ignores, self._held = True, b""
            return self.transport.close()
        data, self._held = self._held, b""
        fd = os.dup(self.transport.get_extra_info("socket").fileno())
        self._switch.hand_over(place, fd, data)
        self.transport.abort()

    def _admit(self) -> None:
        data, self._held = self._held, b""
        self._admitted = True
        super().data_received(data)

    def on_headers_complete(self) -> None:
        if not self._admitted:
            return self._ignore_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ignores:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignores:
            self._admitted = False
            super().on_message_complete()

    def _ignore_more(self) -> None:
        """Another request came before this one was answered: it is not looked at, and the connection ends."""
        self._ignores = True
        if self._is_answering():
            self.cycle.keep_alive = False

    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        if self._finding is not None:
            self._finding.cancel()
        super().connection_lost(exc)


class ConnectionPipe:
    """Open connections on their way to and from another process, in order."""

    def __init__(self, sock: socket.socket, arrive: Callable[[socket.socket, bytes], None]) -> None:
        """`arrive` gets every connection that comes, with what was read of it before."""
        self._sock, self._arrive = sock, arrive
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int | None, bytes]] = deque()
        self._parts: list[bytes] = []
        self._arriving: socket.socket | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._read)

    @staticmethod
    def make() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, fd: int, data: bytes) -> None:
        """Closes `fd` once it is on its way."""
        pieces = [data[at : at + PACKET] for at in range(0, len(data), PACKET)] or [b""]
        for number, piece in enumerate(pieces):
            mark = LAST if number == len(pieces) - 1 else MORE
            self._waiting.append((fd if number == 0 else None, mark + piece))
        if len(self._waiting) == len(pieces):
            self._write()

    def _write(self) -> None:
        while self._waiting:
            fd, packet = self._waiting[0]
            try:
                socket.send_fds(self._sock, [packet], [] if fd is None else [fd])
            except BlockingIOError:
                return self._loop.add_writer(self._sock.fileno(), self._write)
            except ConnectionError:
                return self._drop()
            except OSError:  # too many are on their way
                self._loop.remove_writer(self._sock.fileno())
                self._loop.call_later(BUSY, self._write)
                return None
            self._waiting.popleft()
            if fd is not None:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    packet, fds, _, _ = socket.recv_fds(self._sock, PACKET + 1, 1)
                except ConnectionError:
                    packet, fds = b"", []
                if not packet:
                    self._loop.remove_reader(self._sock.fileno())
                    return
                if fds:
                    self._arriving, self._parts = socket.socket(fileno=fds[0]), []
                self._parts.append(packet[1:])
                if packet[:1] == LAST and self._arriving is not None:
                    connection, self._arriving = self._arriving, None
                    self._arrive(connection, b"".join(self._parts))

    def _drop(self) -> None:
        """Nobody is there any more: their clients see that the connections end."""
        for fd, _ in self._waiting:
            if fd is not None:
                os.close(fd)
        self._waiting.clear()
        self._loop.remove_writer(self._sock.fileno())

    def close(self) -> None:
        self._drop()
        self._loop.remove_reader(self._sock.fileno())
        if self._arriving is not None:
            self._arriving.close()
        self._sock.close()
