"""The head of an answer and its body as one packet.

uvicorn writes them one after the other, and the event loop sends each at once: two system calls, and a client on the
same machine that wakes up for the head only to wait for the body. Here a head is held until something follows it, at
most to the end of this turn of the loop: a stream whose first piece is yet to come shows its head in time.
"""

from __future__ import annotations

import asyncio

MAX_COPIED = 256 << 10
"""Bytes of a body: copying a larger one costs more than another system call."""


class JoinedHead(asyncio.Transport):
    """What one answer is written to in place of its connection's transport."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._begun = False
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._begun:
            self._begun, self._head = True, bytes(data)
            self._loop.call_soon(self._flush)
        elif self._head and len(data) <= MAX_COPIED:
            data, self._head = b"".join((self._head, data)), b""
            self._transport.write(data)
        else:
            self._flush()
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            if not self._transport.is_closing():
                self._transport.write(head)
