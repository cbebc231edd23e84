"""How coroutines of one process hear that something became durable."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from strop.store.sqlite_writer import call_in

T = TypeVar("T")


class Signal:
    """Wakes every coroutine that waits, in whichever loop it does. Fired from the writer's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def waiter(self) -> asyncio.Future[None]:
        """Take it before looking, so that what happens between the look and the wait is not missed."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.add(future)
        return future

    def forget(self, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def fire(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            call_in(future.get_loop(), lambda future=future: None if future.done() else future.set_result(None))


async def wait_until(
    signal: Signal,
    timeout: float,
    look: Callable[[], Awaitable[T | None]],
    due: Callable[[], float] = lambda: math.inf,
) -> T | None:
    """What `look` finds, looking again at every signal, and after `due()` seconds without one, until it finds something
    or the time is over."""
    if timeout <= 0:
        return await look()
    deadline = time.monotonic() + timeout
    while True:
        waiter = signal.waiter()
        try:
            found = await look()
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            await asyncio.wait([waiter], timeout=min(left, max(due(), 0.001)))
        finally:
            signal.forget(waiter)
            waiter.cancel()
