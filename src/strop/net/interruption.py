"""Ends a block of code that takes too long, or that nobody waits for any more.

    with Interruption(seconds) as interruption:
        await work()
    if interruption.cause == "late": ...

As `asyncio.timeout`, but all blocks of the same length share one timer of the loop: most end long before it, and a
timer for each costs more than what it guards.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Literal, cast

Cause = Literal["late", "gone"]


class Interruption:
    """`cause` says what ended the block, if anything did: more than `seconds` had passed, or `end_for` was called."""

    __slots__ = ("_cancelling", "_clock", "_task", "cause")

    def __init__(self, seconds: float) -> None:
        self._clock = _find_clock(seconds)
        self.cause: Cause | None = None

    def __enter__(self) -> Interruption:
        self._task = cast("asyncio.Task[object]", asyncio.current_task(self._clock.loop))
        self._cancelling = self._task.cancelling()
        self._clock.start(self)
        return self

    def end_for(self, cause: Cause) -> None:
        """Cancel what the block waits for. Only while it runs."""
        if self.cause is None:
            self.cause = cause
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._clock.stop(self)
        if self.cause is None:
            return False
        ours = self._task.uncancel() <= self._cancelling
        return ours and kind is asyncio.CancelledError


class _Clock:
    """The blocks at work that may take so many seconds each. Those that began first are over first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.loop, self._seconds = loop, seconds
        self._ends: dict[Interruption, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, block: Interruption) -> None:
        self._ends[block] = end = self.loop.time() + self._seconds
        if self._timer is None:
            self._timer = self.loop.call_at(end, self._ring)

    def stop(self, block: Interruption) -> None:
        self._ends.pop(block, None)

    def _ring(self) -> None:
        self._timer, now = None, self.loop.time()
        for block, end in list(self._ends.items()):
            if end > now:
                self._timer = self.loop.call_at(end, self._ring)
                return
            del self._ends[block]
            block.end_for("late")


_latest: tuple[asyncio.AbstractEventLoop | None, dict[float, _Clock]] = (None, {})
"""The clocks of the loop that was asked for last: a program has one, and tests have one after the other."""


def _find_clock(seconds: float) -> _Clock:
    global _latest
    loop = asyncio.get_running_loop()
    if _latest[0] is not loop:
        _latest = loop, {}
    clocks = _latest[1]
    clock = clocks.get(seconds)
    if clock is None:
        clock = clocks[seconds] = _Clock(loop, seconds)
    return clock
