"""Signs of life of a process that holds weights, so that one that hangs is killed rather than waited for.

    in the process      a thread says every second that it is there, and for how long it has been in one operation
    seen from the run   silent for `learner.hang_timeout`: it is stopped, or no thread of it gets Python's lock
                        in one operation for `learner.collective_timeout`: a file, a driver, another rank

The thread needs Python's lock (GIL) for some microseconds, which every long operation of torch's and every read of a
file gives back. Whatever keeps it (loading a library, unpickling a batch) must be done within `learner.hang_timeout`.

Nothing is asked of those who work: an operation is one if every look at its thread finds the same calls in the same
places. Left out: work that goes on for ever, and is at something else at each look.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BEAT = 1.0
"""Seconds between two signs of life."""
WORTH_SAYING = 5.0
"""Seconds in one operation from which on its place is said."""
STARTING = 600.0
"""Seconds of silence that are allowed to a process that still loads libraries, before its settings are known."""

Stack = tuple[tuple[CodeType, int], ...]


class Heartbeat:
    """In the process. `send` gives one sign: how many seconds it has been in one operation, and in which."""

    def __init__(self, send: Callable[[float, str], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._work: dict[int, tuple[int, bool]] = {}  # by thread: which piece of work, and whether others do it
        self._seen: dict[int, tuple[Any, float]] = {}  # by thread: what it was found at, and since when
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextlib.contextmanager
    def work(self, *, by_others: bool = False) -> Iterator[None]:
        """This thread is at work in the block, or waits for other threads that are. What does not work may wait for
        ever."""
        me = threading.get_ident()
        self._work[me] = next(self._numbers), by_others
        try:
            yield
        finally:
            del self._work[me]

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more
            while True:
                self._send(*self.look(time.monotonic()))
                time.sleep(BEAT)

    def look(self, now: float) -> tuple[float, str]:
        """The longest that a thread has been in one operation, and what that is."""
        frames = sys._current_frames()
        frames.pop(self._thread.ident or 0, None)
        seen: dict[int, tuple[Any, float]] = {}
        longest, where = 0.0, ""
        for thread, (number, by_others) in self._work.copy().items():
            if thread not in frames:
                continue
            found = number, [read_stack(each) for each in (frames.values() if by_others else [frames[thread]])]
            before, since = self._seen.get(thread, (None, now))
            seen[thread] = found, since if found == before else now
            if (still := now - seen[thread][1]) > longest:
                longest, where = still, describe(frames[thread]) if still > WORTH_SAYING else ""
        self._seen = seen
        return longest, where


def read_stack(frame: FrameType | None) -> Stack:
    """Every call under way in a thread, and where it is."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def describe(frame: FrameType | None) -> str:
    """The operation that a thread is in, for whoever looks for the reason: what of ours asked for it."""
    waits = frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith("strop."):
        frame = frame.f_back
    if frame is None:
        return ""
    place = f"{frame.f_code.co_qualname} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f"waiting for other ranks, {place}" if waits else place


def limit_silence(fd: int, seconds: float) -> None:
    """Has reads of a socket fail with `BlockingIOError` once nothing came for so long. A process that is itself stopped
    meanwhile begins to wait anew."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def hang_up(fd: int) -> None:
    """Whoever is about to read from a socket, or to write to it, is not kept waiting any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)
