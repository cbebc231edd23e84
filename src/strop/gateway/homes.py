"""Which of several places answers a rollout: the same one again, which knows its prefixes, until it has too much to do.

    homes = Homes(replicas)
    replica = homes.find("g1.0", time.monotonic())

A rollout moves once more than twice as much is in flight at its home as at the others (their median), or it cannot
answer any more: to the place with the least to do. So a full one does not starve others, and none waits for one that is
gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

KNOWN = 65536
"""How many rollouts' homes are remembered."""
LOOKS = 16
"""How many places one look costs, at most in the mean: what is found out about all of them is used for several looks if
there are more than that, so that a request costs no more before many places than before few."""


class Home(Protocol):
    """`rollouts` are those that have their home there, counted by `Homes`."""

    rollouts: int

    @property
    def in_flight(self) -> int: ...

    def can_answer(self, now: float) -> bool: ...


H = TypeVar("H", bound=Home)


class Homes(Generic[H]):
    """`places` may grow."""

    def __init__(self, places: Sequence[H]) -> None:
        self._places = places
        self._of: OrderedDict[str, H] = OrderedDict()
        self._left, self._in_flight = 0, list[int]()  # in order; looked at now and then

    def find(self, rollout: str, now: float, but: Sequence[H] = ()) -> H | None:
        """Who answers its next request; None if nobody can."""
        home = self._of.get(rollout)
        if home is not None and home not in but and self._has_place(home, now):
            self._of.move_to_end(rollout)
            return home
        able = [place for place in self._places if place not in but and place.can_answer(now)]
        chosen = min(able, key=lambda place: (place.in_flight, place.rollouts), default=None)
        if chosen is not None:
            self.settle(rollout, chosen)
        return chosen

    def settle(self, rollout: str, home: H) -> None:
        """From now on it is at home there."""
        if (before := self._of.pop(rollout, None)) is not None:
            before.rollouts -= 1
        self._of[rollout] = home
        home.rollouts += 1
        if len(self._of) > KNOWN:
            self._of.popitem(last=False)[1].rollouts -= 1

    def _has_place(self, home: H, now: float) -> bool:
        """Whether it can answer, and has at most twice as much in flight as the others (their median)."""
        if not home.can_answer(now):
            return False
        self._left -= 1
        if self._left < 0:
            able = [place for place in self._places if place.can_answer(now)]
            self._left, self._in_flight = len(able) // LOOKS, sorted(place.in_flight for place in able)
        at = bisect_left(self._in_flight, home.in_flight)
        others = self._in_flight[:at] + self._in_flight[at + 1 :]
        if at == len(self._in_flight):  # it has more to do than when it was looked at
            others = others[:-1]
        middle = len(others) // 2
        usual = (others[middle] + others[~middle]) / 2 if others else float("inf")
        return home.in_flight <= 2 * max(1, usual)
