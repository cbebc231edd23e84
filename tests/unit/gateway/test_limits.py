"""Requests in flight are counted over all processes of a gateway."""

from collections import Counter

import pytest

from strop.gateway.dialects.base import ApiError
from strop.gateway.limits import InFlight, Limits, RequestCounter
from strop.gateway.session import Session
from strop.types import Attempt, Rollout, Task


def make_session(id: str) -> Session:
    rollout = Rollout(id=id, group=id, member=0, task=Task(id="t"), created=0.0)
    return Session(rollout, Attempt(rollout=id, number=1, runner="w", key="k", started=0.0, lease_until=1.0))


def test_one_limit_for_all_processes() -> None:
    memory, refused = memoryview(bytearray(16)).cast("q"), Counter[str]()
    here, there = (RequestCounter(Limits(in_flight=2), refused, InFlight(memory, place)) for place in (0, 1))
    ours, others = make_session("a"), make_session("b")
    here.begin(ours)
    there.begin(others)
    for counter in (here, there):
        with pytest.raises(ApiError, match="the gateway has 2 requests in flight"):
            counter.begin(make_session("c"))
    there.end(others)
    here.begin(more := make_session("d"))  # the other process has ended its own
    here.end(ours)
    here.end(more)
    assert (list(memory), refused["too_many"]) == ([0, 0], 2)


def test_attempts_with_calls_in_flight_are_told_once() -> None:
    heard: list[object] = []
    counter = RequestCounter(Limits(), Counter(), InFlight(tell=lambda *said: heard.append(said)))
    session = make_session("a")
    counter.begin(session)
    counter.begin(session)
    counter.end(session)
    assert heard == [("began", ("a", 1))]
    counter.end(session)
    assert heard == [("began", ("a", 1)), ("ended", ("a", 1))]
