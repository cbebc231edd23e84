"""What evaluations say, in sentences that must be right."""

from typing import Any

import pytest

from strop.config import AlgorithmConfig, Config
from strop.errors import AgentError
from strop.monitor.evaluations import Evaluation, report

CONFIG = Config(agent="a.py:f", tasks="t.jsonl")
Rewards = dict[str, dict[str, list[float]]]


def values(*earned: float) -> Rewards:
    return {"reward": {f"t{i}": [value] for i, value in enumerate(earned)}}


def made(number: int, rewards: Rewards, **more: Any) -> Evaluation:
    fields = {"way": "trained", "history": "sampled", "weights": "w", "folder": "f", "rewards": {"test": rewards}}
    return Evaluation(number=number, model=f"m{number}", **(fields | more))


def test_one_model() -> None:
    found = report(CONFIG, [made(1, values(*[0, 1] * 10))], samples=1)
    assert found.verdict.startswith("m1 scores 0.500 (reward, mean@1, on test); with 95 % confidence between 0.")
    assert found.comparisons == []
    assert found.evaluations[0].scores["val-core/test/reward/pass@1"].value == 0.5


def test_better_worse_and_not_to_be_told_apart() -> None:
    good, bad = values(*[1] * 20), values(*[0] * 14, *[1] * 6)
    assert "m1 scores 0.700 more than m2" in (said := report(CONFIG, [made(1, good), made(2, bad)], samples=1).verdict)
    assert "0 lies outside of that: it is better" in said
    assert "0.700 less" in (said := report(CONFIG, [made(1, bad), made(2, good)], samples=1).verdict)
    assert "it is worse" in said
    close = values(*[1] * 7, *[0] * 13)
    assert "0 lies within that" in report(CONFIG, [made(1, close), made(2, bad)], samples=1).verdict
    assert "the very same on every task" in report(CONFIG, [made(1, bad), made(2, bad)], samples=1).verdict
    assert "2 tasks are too few" in report(CONFIG, [made(1, values(1, 1)), made(2, values(0, 0))], samples=1).verdict


def test_who_is_compared_with_whom() -> None:
    done = [made(n, values(1, 0), way=way) for n in (1, 2, 3) for way in ("trained", "deployed")]
    pairs = [(pair.one, pair.other) for pair in report(CONFIG, done, samples=1).comparisons]
    assert pairs == [(0, 2), (0, 4), (1, 0), (1, 3), (1, 5), (3, 2), (5, 4)]


def test_deployed_that_differs_is_warned_of() -> None:
    trained = made(1, values(*[1] * 10))
    same = made(1, values(*[1] * 10), way="deployed", turns=30)
    assert report(CONFIG, [trained, same], samples=1).warnings == []
    shown = made(1, values(*[1] * 10), way="deployed", turns=30, branches={"template_rewrote": 4, "edited_history": 9})
    (warning,) = report(CONFIG, [trained, shown], samples=1).warnings
    assert "4 of 30 model calls" in warning
    assert "changes by +0.000" in warning
    worse = made(1, values(*[0] * 10), way="deployed", turns=30)
    (warning,) = report(CONFIG, [trained, worse], samples=1).warnings
    assert "changes by -1.000" in warning


def test_failures_are_counted() -> None:
    (warning,) = report(CONFIG, [made(1, values(0, 1), failed={"timeout": 1})], samples=1).warnings
    assert warning == "m1: 1 rollouts failed and count as 0 (timeout 1)"


def test_a_reward_that_one_of_them_never_gave_is_nothing() -> None:
    both = values(1, 1) | {"polite": {"t0": [1.0], "t1": [0.5]}}
    found = report(CONFIG, [made(1, both), made(2, {})], samples=1)
    assert found.comparisons[0].differences["val-core/test/polite/mean@1"].value == 0.75
    assert found.evaluations[1].rewards["test"]["polite"] == {"t0": [0.0], "t1": [0.0]}
    with pytest.raises(AgentError, match="gave no reward on test"):
        report(CONFIG, [made(1, {}), made(2, {})], samples=1)


def test_the_verdict_is_about_what_training_counts() -> None:
    counts = Config(algorithm=AlgorithmConfig(rewards={"polite": 1.0}))
    both = values(1, 1) | {"polite": {"t0": [1.0], "t1": [0.5]}}
    assert report(counts, [made(1, both)], samples=1).reward == "polite"
    assert report(CONFIG, [made(1, both)], samples=1).reward == "reward"
    assert report(CONFIG, [made(1, {"a/b": both["polite"]})], samples=1).reward == "a/b"


def test_where_only_agents_are_rewarded_the_verdict_is_about_what_one_of_them_got() -> None:
    earned = {f"agents/left/reward/{name}": {"t": [1.0]} for name in ("points", "score")}
    config = Config(agent="a.py:f", tasks="t.jsonl", algorithm=AlgorithmConfig(rewards={"score": 1.0}))
    assert report(config, [made(1, earned)], samples=1).reward == "agents/left/reward/score"
    whole = {**earned, "reward": {"t": [0.0]}}
    assert report(config, [made(1, whole)], samples=1).reward == "reward"
