"""What an evaluation came to: what rollouts, trained agents and turns were given."""

from types import SimpleNamespace
from typing import Any

import pytest

from strop import config as configs
from strop.config import Config
from strop.monitor.metrics import weigh
from strop.run import evaluate
from strop.run.scoring import collect_rewards, show_scores
from strop.types import Cause, Reward, Rollout, Task

TEAM = configs.load(
    sets=["policy.agents=['wolf-*', 'seer']", "algorithm.rewards={reward=0, win=1, format=0.5, tidy=0.5}"]
)


def ended(member: int, *rewards: Reward, cause: Cause | None = None) -> Rollout:
    status = "failed" if cause else "succeeded"
    fields = {"group": "g", "member": member, "task": Task(id=f"t{member}"), "created": 0.0}
    return Rollout(id=f"g.{member}", status=status, cause=cause, rewards=rewards, **fields)  # pyright: ignore


def got(name: str, value: float, agent: str | None = None, turn: str | None = None) -> Reward:
    return Reward(name=name, value=value, agent=agent, turn=turn)


GAMES = [
    ended(
        0, got("reward", 1.0), got("win", 1.0, "wolf-1"), got("win", 0.0, "wolf-2"), got("win", 1.0, "seer"),
        got("win", 1.0, "judge"), got("tidy", 1.0, turn="g.0/1/0"), got("tidy", 0.0, turn="g.0/1/1"),
    ),
    ended(1, got("reward", 0.0), got("win", 1.0, "wolf-1"), got("format", 1.0, "seer")),
    ended(2, got("reward", 1.0), got("win", 1.0, "seer"), cause="agent_error"),
]  # fmt: skip


def test_by_role_for_trained_agents_and_for_turns() -> None:
    assert collect_rewards(TEAM, GAMES) == {
        "agents/seer/reward/format": [0.0, 1.0, 0.0],
        "agents/seer/reward/win": [1.0, 0.0, 0.0],
        "agents/wolf/reward/win": [0.5, 1.0, 0.0],
        "reward": [1.0, 0.0, 0.0],
        "turns/reward/tidy": [0.5, 0.0, 0.0],
    }


def test_agents_of_frozen_policies_are_left_out() -> None:
    config = configs.load(sets=["policies.left.model=strop/nano", "policies.right.frozen=true"])
    games = [ended(0, got("win", 1.0, "left"), got("win", 0.0, "right"))]
    assert collect_rewards(config, games) == {"agents/left/reward/win": [1.0]}
    sets = ["policies.old.agents=['wolf-1']", "policies.old.frozen=true", "policies.new.agents=['wolf-*']"]
    games = [ended(0, got("win", 1.0, "wolf-1"), got("win", 0.0, "wolf-2"))]
    assert collect_rewards(configs.load(sets=sets), games) == {
        "agents/wolf/reward/win": [0.0]
    }  # the first one takes it


def test_an_evaluation_has_them_all_and_shows_their_sum() -> None:
    shown: dict[str, float] = {}
    view = SimpleNamespace(evaluation=lambda step, scores: shown.update(scores), note=lambda text: None)
    run: Any = SimpleNamespace(config=TEAM, rewards={*TEAM.algorithm.rewards}, view=view, scores={}, metrics=None)
    show_scores(run, 3, "test", GAMES)
    means = run.scores[3, "test"]
    assert means["reward"] == means["agents/seer/reward/win"] == pytest.approx(1 / 3)
    total = 0.5 + 1 / 3 + 0.5 / 3 + 0.5 / 6  # wolves, seer, its format, turns
    assert shown == pytest.approx({"test reward": 1 / 3, "test agents": total})
    assert weigh(means, TEAM.algorithm.rewards) == pytest.approx(total)


def test_where_whole_rollouts_get_what_counts_agents_add_nothing() -> None:
    means = {"reward": 0.25, "agents/wolf/reward/win": 1.0}
    assert weigh(means, {"reward": 1.0, "win": 1.0}) == 0.25
    assert weigh(means, {"reward": 0.0, "win": 1.0}) == 1.0
    assert weigh(means, {"reward": 0.0, "other": 1.0}) == 0.0


def test_an_agent_may_reward_nobody_but_agents() -> None:
    games = [ended(0, got("win", 1.0, "main")), ended(1)]
    assert evaluate._rewards(Config(), games) == {"agents/main/reward/win": {"t0": [1.0], "t1": [0.0]}}
