"""What each role did and got, from whole rollouts."""

import pytest
from msgspec import structs

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig
from strop.monitor.metrics import check
from strop.run.agent_metrics import MOST, describe_agents
from strop.trajectory import Sample, assemble
from strop.types import Reward, Rollout, Task, Turn


def turn(rollout: str, number: int, agent: str, *, outside: bool = False) -> Turn:
    ids = [] if outside else [5, 6, 7][: number + 1]
    return Turn(
        id=f"{rollout}/1/{number}",
        rollout=rollout,
        attempt=1,
        agent=agent,
        policy="rival" if outside else "main",
        prompt_ids=[] if outside else [1, 2],
        response_ids=ids,
        logprobs=[-0.5] * len(ids),
        versions=[] if outside else [(0, "1.0")],
        finish="stop",
        ended=float(number) + 0.5,
        started=float(number),
    )


def sample(member: int, won: float, *, outside: bool = False) -> Sample:
    id = f"g1.{member}"
    turns = [turn(id, 0, "wolf-1"), turn(id, 1, "wolf-2", outside=outside), turn(id, 2, "seer")]
    rewards = (
        Reward(value=won),
        *(Reward(name="win", value=won, agent=f"wolf-{k}") for k in (1, 2)),
        Reward(name="win", value=1 - won, agent="seer"),
        Reward(name="format", value=0.5, turn=turns[2].id),
    )
    rollout = Rollout(
        id=id, group="g1", member=member, task=Task(id="t"), created=0.0, status="succeeded", rewards=rewards
    )
    return Sample(rollout, turns)


def test_by_role() -> None:
    samples = [sample(0, 1.0), sample(1, 0.0, outside=True), sample(2, 1.0)]
    batch = assemble(samples, agents=["wolf-*"], budget=100)
    make(AlgorithmConfig(), LearnerConfig()).assign_credit(batch)
    found = describe_agents(samples, [batch])
    assert found["agents/wolf/num_turns"] == 2.0
    assert found["agents/wolf/tokens"] == 3 * 1 + 2 * 2
    assert found["agents/wolf/loss_tokens"] == 7.0
    assert found["agents/wolf/outside"] == pytest.approx(1 / 6)
    assert found["agents/wolf/reward/win"] == pytest.approx(2 / 3)
    assert (found["agents/seer/loss_tokens"], found["agents/seer/tokens"]) == (0.0, 9.0)
    assert found["agents/seer/reward/win"] == pytest.approx(1 / 3)
    assert found["agents/seer/reward/format"] == 0.5
    assert "agents/wolf/reward/format" not in found


def test_one_role_is_the_run() -> None:
    samples = [Sample(one.rollout, one.turns[:2]) for one in (sample(0, 1.0), sample(1, 0.0))]
    assert describe_agents(samples, []) == {}


def test_names_that_agents_make_up_are_no_metrics() -> None:
    """A name with a line break in it, and one of its own for every rollout."""
    odd = sample(0, 1.0)
    turns = [structs.replace(turn, agent=name) for turn, name in zip(odd.turns, ("a\nb", "x/y", "wolf-1"), strict=True)]
    assert {name.split("/")[1] for name in describe_agents([Sample(odd.rollout, turns)], [])} == {"other", "wolf"}
    check(describe_agents([Sample(odd.rollout, turns)], []))
    many = [structs.replace(odd.turns[0], id=f"g1.0/1/{n}", agent=f"agent{n}") for n in range(100)]
    assert len({name.split("/")[1] for name in describe_agents([Sample(odd.rollout, many)], [])}) == MOST + 1
