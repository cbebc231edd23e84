"""A program's stdin, stdout and stderr as events: what it prints is told while it runs, and its end is kept."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from typing import IO, cast

from strop.runners import output
from strop.runners.base import Say
from strop.runners.output import KEPT, PIECE

EVERY = 0.5
"""Seconds after which output is told that does not fill an event."""
DRAIN = 2.0
"""Seconds to wait for the end of the output once all that could write to it was killed."""


class Streams:
    """A program's stdin, stdout and stderr. `news` is set when there is something to tell."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.out = _Output("stdout", self.news.set)
        self.err = _Output("stderr", self.news.set)
        self._input = _Input()
        self._outputs: list[asyncio.ReadTransport] = []

    async def connect(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        """Send `message` as its input, and take what it prints."""
        loop = asyncio.get_running_loop()
        for pipe, stream in ((process.stdout, self.out), (process.stderr, self.err)):
            transport, _ = await loop.connect_read_pipe(lambda stream=stream: stream, cast("IO[bytes]", pipe))
            self._outputs.append(transport)
        transport, _ = await loop.connect_write_pipe(lambda: self._input, cast("IO[bytes]", process.stdin))
        transport.write(message)  # a program that does not read it closes the pipe, which hurts nobody
        transport.write_eof()

    async def tell(self, say: Say, *, last: bool = False) -> None:
        for stream in (self.out, self.err):
            await stream.tell(say, last)

    async def close(self) -> None:
        await asyncio.wait([self.out.closed, self.err.closed], timeout=DRAIN)
        for transport in self._outputs:
            transport.close()
        if self._input.transport is not None:
            self._input.transport.abort()


class _Input(asyncio.BaseProtocol):
    """Knows its transport while that is open: asyncio's cannot be aborted after its end."""

    transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None


class _Output(asyncio.Protocol):
    """One stream: its beginning goes out in pieces, its end is kept, and what lies between is counted."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self._name = name
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._pending = bytearray()
        self._tail = bytearray()
        self._taken = 0
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * KEPT:
            del self._tail[:-KEPT]
        kept = data[: KEPT - self._taken]
        self._pending += kept
        self._taken += len(kept)
        self._dropped += len(data) - len(kept)
        if len(self._pending) >= PIECE:
            self._wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._wake)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def end(self) -> str:
        """The last of it, as text."""
        return output.decode(self._tail[-KEPT:])

    async def tell(self, say: Say, last: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for text in output.take(self._pending, last=last):
            await say("message", output.make_message(self._name, text))
        if last and self._dropped:
            await say("message", output.make_dropped_message(self._name, self._dropped))
