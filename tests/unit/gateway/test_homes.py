"""Where rollouts are at home: they stay, spread out, and leave what is full or gone."""

from collections import Counter
from dataclasses import dataclass

from strop.engines.direct_line import DirectLine
from strop.gateway.homes import Homes
from strop.gateway.relay import PolicyLines
from strop.types import Rollout, Task

LINE = DirectLine(url="http://127.0.0.1:9", model="m", version="1.0", context=9, vocabulary=9, open=True)


@dataclass
class Place:
    in_flight: int = 0
    rollouts: int = 0
    there: bool = True

    def can_answer(self, now: float) -> bool:
        return self.there


def test_rollouts_are_spread_and_stay() -> None:
    places = [Place() for _ in range(4)]
    homes = Homes(places)
    found = {str(n): homes.find(str(n), 0.0) for n in range(40)}
    assert [place.rollouts for place in places] == [10] * 4
    for name, place in found.items():
        assert homes.find(name, 1.0) is place


def test_a_full_place_is_left_and_one_that_is_merely_busy_is_not() -> None:
    busy, *others = places = [Place() for _ in range(5)]
    homes = Homes(places)
    homes.settle("a", busy)
    for other in others:
        other.in_flight = 4
    busy.in_flight = 8
    assert homes.find("a", 0.0) is busy
    busy.in_flight = 9
    assert homes.find("a", 0.0) in others
    assert busy.rollouts == 0


def test_what_is_gone_is_left_and_nobody_is_found_where_nobody_is() -> None:
    first, second = places = [Place(), Place()]
    homes = Homes(places)
    homes.settle("a", first)
    first.there = False
    assert homes.find("a", 0.0) is second
    assert homes.find("a", 0.0, but=[second]) is None
    assert homes.find("a", 0.0) is second, "it has not moved"


def rollout(number: int) -> Rollout:
    return Rollout(id=f"g{number}.0", group=f"g{number}", member=0, task=Task(id="t"), created=0.0)


async def test_lines_to_servers_that_are_gone_are_not_asked() -> None:
    lines = PolicyLines()
    assert lines.find(rollout(0)) is None
    for replica in (2, 0, 1):
        lines.of_replica(replica).tell(LINE)
    homes = {number: lines.find(rollout(number)) for number in range(30)}
    assert sorted(Counter(home.replica for home in homes.values() if home is not None).values()) == [10] * 3
    lines.of_replica(1).tell(None)
    for number, home in homes.items():
        now = lines.find(rollout(number))
        assert home is not None
        assert now is not None
        assert now.replica == home.replica if home.replica != 1 else now.replica in (0, 2)
