"""What the run sends to a process that holds weights. The event loop never waits for it, however much that is and
whatever the process does meanwhile.

    outgoing.send(b"...", b"...")     where nothing waits, what the socket takes is written at once
                                      the rest, and what is large, is written by a thread

Left out: a limit. What waits here is what the run has asked for, and of a batch for several ranks there is one copy.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from multiprocessing.connection import Connection

LARGE = 2**20
"""Bytes that take a while to be written: a batch has hundreds of millions."""
LONGEST = 2**31 - 1
"""Bytes of a message whose length is written in four."""


class Outgoing:
    """Messages in the order in which they were given, each as `Connection.recv_bytes` reads it at the other end. Once
    that is gone, or this is closed, they are dropped: whoever reads from the connection hears of it."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._given = self._written = 0  # parts: the one is counted by who sends, the other by the thread
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="learner-writer", daemon=True)
        self._thread.start()

    def send(self, *messages: bytes) -> None:
        if self._closed:
            return
        parts = [part for message in messages for part in (write_length(len(message)), message)]
        if sum(map(len, parts)) <= LARGE:
            parts = [self._write_at_once(b"".join(parts))]
        for part in filter(None, parts):
            self._given += 1
            self._queue.put(part)

    def _write_at_once(self, data: bytes) -> bytes:
        """What is left of it."""
        if self._written < self._given:  # it must not overtake
            return data
        try:
            return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError:
            self._hang_up()
            return b""

    def _write(self) -> None:
        with self._socket:
            for part in iter(self._queue.get, b""):
                try:
                    self._socket.sendall(part)
                    self._written += 1
                except OSError:
                    self._hang_up()
                del part  # it may be hundreds of megabytes, and what comes next may be long in coming

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing is sent any more, and the connection is at its end for whoever reads from it."""
        if not self._closed:
            self._closed = True
            self._hang_up()
            self._queue.put(b"")

    def join(self) -> None:
        """Wait for the thread, once it is closed."""
        self._thread.join()


def write_length(size: int) -> bytes:
    r"""As `Connection` writes it before a message.

    >>> write_length(5), write_length(2**32)
    (b'\x00\x00\x00\x05', b'\xff\xff\xff\xff\x00\x00\x00\x01\x00\x00\x00\x00')
    """
    return struct.pack("!i", size) if size <= LONGEST else struct.pack("!iQ", -1, size)
