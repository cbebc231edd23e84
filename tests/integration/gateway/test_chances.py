"""Who answers an agent where an outside model does so in some rollouts only."""

from collections import Counter

import pytest

from strop.config import OutsideConfig
from strop.engines.scripted import Scripted
from strop.errors import ConfigError
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from strop.types import Rollout, Task
from tests.integration.gateway.test_routes import policy

URL = "http://127.0.0.1:9/v1"


def rollout(group: int, member: int = 0, mode: str = "train") -> Rollout:
    return Rollout(
        id=f"g{group}.{member}",
        group=f"g{group}",
        member=member,
        task=Task(id=f"t{group % 7}"),
        created=0.0,
        seed=group * 100 + member,
        mode=mode,
    )


async def test_a_share_of_rollouts(renderer: Renderer) -> None:
    given = {
        "often": OutsideConfig(url=URL, agents=("wolf-*",), probability=0.5),
        "seldom": OutsideConfig(url=URL, agents=("wolf-*", "seer"), probability=0.2),
        "always": OutsideConfig(url=URL, agents=("judge",)),
    }
    routes = Routes.of(policy(Scripted([], renderer), renderer), given)
    drawn = Counter(routes.any("wolf-1", None, rollout(n)).policy for n in range(2000))
    assert drawn.keys() == {"often", "seldom", "p"}
    assert (drawn["often"], drawn["seldom"]) == (pytest.approx(1000, abs=80), pytest.approx(400, abs=70))
    for n in range(50):  # the members of a group meet the same opponents, each agent for itself
        assert len({routes.any("wolf-1", None, rollout(n, member)).policy for member in range(8)}) == 1
        assert routes.any("judge", None, rollout(n)).policy == "always"
        assert routes.any("villager", None, rollout(n)).policy == "p"
        assert routes.any("seer", None, rollout(n)).policy in ("seldom", "p")
    differ = sum(
        routes.any("wolf-1", None, rollout(n)) is not routes.any("wolf-2", None, rollout(n)) for n in range(99)
    )
    assert 30 < differ < 90
    evaluated = [routes.any("wolf-1", None, rollout(n, mode="eval")).policy for n in range(14)]
    assert evaluated[:7] == evaluated[7:]  # a task draws the same in every evaluation
    for n in range(20):  # what is asked for and what is passed on agree
        passed_on, drawn_for = routes.outside("wolf-1", b"{}", rollout(n)), routes.any("wolf-1", None, rollout(n))
        assert passed_on is (None if drawn_for.policy == "p" else drawn_for)
    await routes.close()


def test_more_often_than_always(renderer: Renderer) -> None:
    given = {name: OutsideConfig(url=URL, agents=("x",), probability=0.6) for name in "ab"}
    with pytest.raises(ConfigError, match=r"probabilities of a and b for 'x' come to more than 1\. Fix: lower them"):
        Routes.of(policy(Scripted([], renderer), renderer), given)


def test_a_name_that_nobody_answers_for_in_other_rollouts(renderer: Renderer) -> None:
    given = {"a": OutsideConfig(url=URL, agents=("x",), probability=0.6)}
    known = policy(Scripted([], renderer), renderer)
    with pytest.raises(
        ConfigError, match=r"outside\.a answers for 'x' in some rollouts, .* no policy does\. Fix: put it"
    ):
        Routes.of(None, given, {"y": known})
    Routes.of(None, given, {"x": known})
    Routes.of(known, given, {"y": known})
