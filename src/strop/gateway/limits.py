"""How much is taken on at once, and for how long.

A request over a limit is refused with 429 and told when to come again, before anything of it is read: what is in flight
keeps its memory and its place. A deadline ends a request that nobody seems to wait for any more, or that an engine does
not get done; a client that does not read its stream runs into it as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from strop.gateway.dialects.base import ApiError
from strop.gateway.session import Session
from strop.store.base import Ref


class Limits(Struct, frozen=True, kw_only=True):
    """Requests in flight, in all and of one attempt; seconds for one request."""

    in_flight: int = 4096
    per_attempt: int = 256
    deadline: float = 1800.0


class InFlight:
    """How many requests are in flight, in this process and in those that share the memory: a number for each of them,
    which only that one writes. `tell` hears of attempts of which one begins to be, and of which none is any more."""

    def __init__(
        self,
        memory: memoryview | None = None,
        place: int = 0,
        tell: Callable[[Literal["began", "ended"], Ref], None] | None = None,
    ) -> None:
        self._slots = memoryview(bytearray(8)).cast("q") if memory is None else memory
        self._place = place
        self.tell = tell

    def add(self, count: int) -> None:
        self._slots[self._place] += count

    def total(self) -> int:
        return sum(self._slots)


class RequestCounter:
    """Counts requests in flight; `counts` is told what was refused."""

    def __init__(self, limits: Limits, counts: Counter[str], in_flight: InFlight) -> None:
        self._limits, self._counts = limits, counts
        self._in_flight = in_flight

    def begin(self, session: Session) -> None:
        """One request of a session is at work, until `end` is called. Raises `ApiError`."""
        limits = self._limits
        if session.in_flight >= limits.per_attempt:
            self._refuse(f"this attempt has {session.in_flight} requests in flight, which is the most it may have")
        if (total := self._in_flight.total()) >= limits.in_flight:
            self._refuse(f"the gateway has {total} requests in flight, which is the most it takes")
        self._in_flight.add(1)
        session.in_flight += 1
        if self._in_flight.tell is not None and session.in_flight == 1:
            self._in_flight.tell("began", (session.rollout.id, session.attempt.number))

    def end(self, session: Session) -> None:
        self._in_flight.add(-1)
        session.in_flight -= 1
        if self._in_flight.tell is not None and session.in_flight == 0:
            self._in_flight.tell("ended", (session.rollout.id, session.attempt.number))

    def _refuse(self, why: str) -> None:
        self._counts["too_many"] += 1
        message = f"{why}. Fix: ask again in a moment, or raise gateway.in_flight or gateway.in_flight_per_attempt"
        raise ApiError(message, status=429, kind="rate_limit_error", code="rate_limit_exceeded")
