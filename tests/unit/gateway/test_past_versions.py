"""Which past version answers in a rollout: as often as it should, the same for a group, and never in evaluations."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from strop.gateway.past_versions import PastVersions, PoolMember
from strop.types import Rollout, Task

ENGINES: dict[str, Any] = {name: object() for name in ("own", "a", "b")}


@pytest.fixture
def pool() -> PastVersions:
    past = PastVersions("right", ENGINES["own"], [ENGINES["a"], ENGINES["b"]])
    past.members = [PoolMember("1.0", ENGINES["own"], 0.5), PoolMember("1.4", ENGINES["b"], 1.5)]
    return past


def rollout(number: int, member: int = 0) -> Rollout:
    group = f"g{number:06d}"
    return Rollout(id=f"{group}.{member}", group=group, member=member, task=Task(id="t"), created=0.0)


def name(engine: object) -> str:
    return next(name for name, one in ENGINES.items() if one is engine)


def test_as_often_as_it_weighs(pool: PastVersions) -> None:
    drawn = Counter(name(pool._choose(rollout(n))) for n in range(4000))
    assert drawn.keys() == {"own", "b"}
    assert abs(drawn["b"] / 4000 - 0.75) < 0.03  # four standard deviations


def test_a_group_meets_one(pool: PastVersions) -> None:
    for n in range(50):
        assert len({name(pool._choose(rollout(n, member))) for member in range(8)}) == 1
        again = replace(rollout(n), id=f"g{n:06d}~2.0", group=f"g{n:06d}~2")  # sampled anew after a resume
        assert pool._choose(again) is pool._choose(rollout(n))


def test_in_evaluations_and_before_there_is_a_pool_it_is_the_model_itself(pool: PastVersions) -> None:
    assert {name(pool._choose(replace(rollout(n), mode="eval"))) for n in range(50)} == {"own"}
    pool.members = []
    assert {name(pool._choose(rollout(n))) for n in range(50)} == {"own"}
