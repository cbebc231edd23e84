"""Before anything is trained: are the rewards that count among those that were given?"""

from types import SimpleNamespace
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.run.collect import check_rewards
from strop.types import Reward, Rollout, Task


def told(rewards: dict[str, float], *given: str, data: object = None) -> list[str]:
    """What is noted of a run that counts `rewards`, whose rollouts gave one reward each; it may learn from `data`."""
    notes: list[str] = []
    run: Any = SimpleNamespace(rewards=set(rewards), data=data, view=SimpleNamespace(note=notes.append))
    ended = [
        Rollout(id=f"g.{m}", group="g", member=m, task=Task(id="t"), created=0.0, rewards=(Reward(name=n, value=1.0),))
        for m, n in enumerate(given)
    ]
    check_rewards(run, ended)
    return notes


def test_a_reward_may_be_rare() -> None:
    assert told({"reward": 1.0, "format": 0.5}, "reward", "format", "reward") == []
    [note] = told({"reward": 1.0, "fromat": 0.5}, "reward", "format")
    assert note == (
        "algorithm.rewards counts fromat, and so far the agent gave only format, reward: what is not given counts as 0"
    )


def test_one_of_them_must_be_there() -> None:
    with pytest.raises(
        ConfigError, match=r"counts a, b, but the agent gave only c\. Fix: .* --set algorithm\.rewards\.c=1"
    ):
        told({"a": 1.0, "b": 0.5}, "c")
    with pytest.raises(ConfigError, match="gave no reward"):
        told({"a": 1.0})


def test_a_run_on_stored_data_is_not_stopped_for_what_its_evaluations_give() -> None:
    assert told({"reward": 1.0}, "score", data="stored") == [
        "algorithm.rewards counts reward, and so far the agent gave only score: what is not given counts as 0"
    ]
