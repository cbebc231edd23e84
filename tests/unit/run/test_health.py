"""Which series of metrics are a collapse, and which only look like one."""

import random
from collections.abc import Sequence

import pytest

from strop.run.health import Collapse, find_collapse, warn_of_nothing_since, warn_of_nothing_yet
from strop.types import Step

RATES = {"learner.optim.lr": 0.02}


def series(*steps: dict[str, float], rollouts: int = 64) -> list[Step]:
    return [
        Step(lineage=1, number=n, rollouts=[f"r{n}.{i}" for i in range(rollouts)], metrics=metrics, time=0.0)
        for n, metrics in enumerate(steps, 1)
    ]


def lively(mean: float, **more: float) -> dict[str, float]:
    """A step in which some did better than others."""
    learnt = {"actor/skipped": 0.0, "actor/entropy": 0.4, "critic/advantages/min": -1.0, "critic/advantages/max": 1.0}
    learnt |= {"response_length/clip_ratio": 0.0, "training/rollout_logprobs_diff_mean": 1e-6, "actor/ppo_kl": 0.01}
    rewards = {"critic/rewards/mean": mean, "critic/rewards/min": 0.0, "critic/rewards/max": 1.0}
    return learnt | rewards | {name.replace("__", "/"): value for name, value in more.items()}


def flat(reward: float) -> dict[str, float]:
    """A step in which all did the same."""
    return {"actor/skipped": 1.0} | {f"critic/rewards/{name}": reward for name in ("mean", "min", "max")}


def first(steps: Sequence[Step], patience: int = 5) -> tuple[int, Collapse] | None:
    """The step behind which a run is stopped, as the loop asks: behind each."""
    for n in range(1, len(steps) + 1):
        if found := find_collapse(steps[:n], patience):
            return n, found
    return None


def test_a_reward_that_falls_to_zero_and_stays_there() -> None:
    """As seen with the demo's model and a rate that warm-up takes too high: it falls, recovers, and breaks."""
    seen = [0.188, 0.797, 0.047, 0.094, 0.594, 0.859, 0.109]
    stopped = first(series(*map(lively, seen), *[flat(0.0)] * 9))
    assert stopped is not None
    behind, found = stopped
    assert (behind, found.since) == (12, 8)
    assert found.why == "no rollout of steps 8 to 12 got more than 0, after 0.384 on average before"


def test_a_first_update_that_breaks_everything() -> None:
    stopped = first(series(lively(0.188), *[flat(0.0)] * 9))
    assert stopped is not None
    assert (stopped[0], stopped[1].since) == (6, 2)


def test_the_worst_reward_need_not_be_zero_nor_the_lowest_ever() -> None:
    for worst in (-1.0, 0.1):
        stopped = first(series(*[lively(0.6)] * 6, *[flat(worst)] * 9))
        assert stopped is not None
        assert (stopped[0], stopped[1].since) == (11, 7), worst


def test_a_solved_run_that_collapses() -> None:
    stopped = first(series(*[lively(0.6)] * 3, *[flat(1.0)] * 20, *[flat(0.0)] * 9))
    assert stopped is not None
    assert (stopped[0], stopped[1].since) == (28, 24)


def test_a_critic_finds_something_to_change_in_equal_rewards() -> None:
    with_critic = {"actor/skipped": 0.0, "critic/values/mean": 0.1, "critic/advantages/max": 2.0}
    stopped = first(series(*[lively(0.6, critic__values__mean=0.4)] * 4, *[flat(0.0) | with_critic] * 9))
    assert stopped is not None
    assert (stopped[0], stopped[1].since) == (9, 5)


def test_groups_that_agree_may_still_move_the_weights() -> None:
    """A penalty for distance does: nothing was skipped, but no reward said what to change."""
    agreed = {"actor/skipped": 0.0, "critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    assert first(series(*[lively(0.6)] * 4, *[flat(0.0) | agreed] * 9)) is not None


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        ({"response_length__clip_ratio": 0.98}, "cut off"),
        ({"actor__entropy": 0.001}, "alike"),
        ({"actor__entropy": 6.0}, "entropy was over"),
        ({"actor__ppo_kl": -3.0}, "KL divergence"),
        ({"training__rollout_logprobs_diff_mean": 0.4}, "logprobs"),
    ],
)
def test_a_fallen_reward_with_a_sign_of_breakdown(sign: dict[str, float], said: str) -> None:
    healthy, broken = [lively(0.6)] * 6, [lively(0.15, **sign)] * 5
    stopped = first(series(*healthy, *broken))
    assert stopped is not None
    assert (stopped[0], stopped[1].since) == (11, 7)
    assert said in stopped[1].why
    assert "fell from 0.6 to 0.15" in stopped[1].why
    assert first(series(*healthy, *broken[:4], lively(0.5, **sign))) is None, "it had recovered"
    assert first(series(*healthy, *[lively(0.6, **sign)] * 9)) is None, "no reward was lost"
    assert first(series(*[lively(0.6, **sign)] * 6, *broken, *broken)) is None, "it was so from the beginning"


def test_a_fallen_reward_alone_is_no_collapse() -> None:
    """Harder tasks, or a bad update that still teaches."""
    assert first(series(*[lively(0.8)] * 6, *[lively(0.1)] * 20)) is None


def test_runs_that_never_earned_anything_or_only_the_best() -> None:
    for always in (0.0, 1.0, -1.0):
        assert first(series(*[flat(always)] * 30)) is None
    assert first(series(*[lively(0.5)] * 3, *[flat(1.0)] * 30)) is None
    assert first(series(flat(0.0), flat(0.0), lively(0.1), *[flat(1.0)] * 30)) is None


def test_a_run_that_never_earned_anything_is_told_once_what_to_do() -> None:
    steps = series(*[flat(0.0)] * 9)
    told = [said for n in range(1, 10) if (said := warn_of_nothing_yet(steps[:n], 5)) is not None]
    assert told == [
        "every rollout of the first 5 steps got 0, so nothing is learnt. Fix: take easier tasks, give part of the "
        "reward for part of the way, or show examples"
    ]
    assert "knows one tool only" in str(warn_of_nothing_yet(steps[:5], 5, "strop/nano"))
    assert "harder tasks" in str(warn_of_nothing_yet(series(*[flat(1.0)] * 5), 5))
    assert warn_of_nothing_yet(series(lively(0.1), *[flat(0.0)] * 4), 5) is None
    assert warn_of_nothing_yet(series(*[flat(0.0)] * 4, flat(1.0)), 5) is None
    assert warn_of_nothing_yet([], 0) is None


def test_a_run_that_earns_nothing_any_more_is_told_once_per_streak() -> None:
    """With few rollouts it may still be bad luck, and is no collapse yet."""
    steps = series(lively(0.125), *[flat(0.0)] * 11, lively(0.125), *[flat(0.0)] * 6, rollouts=8)
    assert first(steps) is None
    told = {n: said for n in range(1, 20) if (said := warn_of_nothing_since(steps[:n], 5, RATES)) is not None}
    assert list(told) == [6, 18]
    assert told[6].startswith("nothing earned since step 1: the learning rate may be too high (learner.optim.lr=0.02),")
    assert told[18].startswith("nothing earned since step 13:")
    failed: dict[str, float] = {"failed/timeout": 8.0}
    assert warn_of_nothing_since(series(lively(0.125), *[flat(0.0)] * 5, failed, rollouts=8), 5, RATES) is None, (
        "told before"
    )


def test_no_note_beside_a_collapse_nor_of_what_never_earned_or_still_does() -> None:
    collapsed = series(lively(0.188), *[flat(0.0)] * 5)
    assert find_collapse(collapsed, 5) is not None
    assert warn_of_nothing_since(collapsed, 5, RATES) is None
    for steps in (series(*[flat(0.0)] * 6), series(lively(0.1), *[flat(1.0)] * 5), series(*[lively(0.1)] * 6), []):
        assert warn_of_nothing_since(steps, 5, RATES) is None
    assert warn_of_nothing_since(series(lively(0.1), flat(0.0), rollouts=8), 0, RATES) is None


def test_failures_without_any_reward_are_another_matter() -> None:
    assert first(series(*[lively(0.5)] * 3, *[{"actor/skipped": 1.0, "failed/timeout": 64.0}] * 9)) is None


def test_patience() -> None:
    steps = series(*[lively(0.5)] * 4, *[flat(0.0)] * 20)
    assert first(steps, patience=0) is None
    stopped = first(steps, patience=12)
    assert stopped is not None
    assert (stopped[0], stopped[1].since) == (16, 5)


@pytest.mark.parametrize(("rate", "rollouts"), [(0.01, 16), (0.05, 16), (0.1, 8), (0.02, 128), (0.3, 4), (0.5, 2)])
def test_bad_luck_is_no_collapse(rate: float, rollouts: int) -> None:
    """Rare rewards come in streaks of nothing. 40 runs of 100 steps at a rate that never changes: none is stopped."""
    rng = random.Random(f"{rate} {rollouts}")
    streaks = 0
    for _ in range(40):
        steps = list[dict[str, float]]()
        for _ in range(100):
            hits = sum(rng.random() < rate for _ in range(rollouts))
            steps.append(flat(0.0) if not hits else flat(1.0) if hits == rollouts else lively(hits / rollouts))
        streaks += any(all(s["critic/rewards/max"] == 0.0 for s in steps[i : i + 5]) for i in range(95))
        assert first(series(*steps, rollouts=rollouts)) is None
    assert streaks or rate * rollouts > 1


def test_of_several_policies_the_one_that_collapsed_is_named() -> None:
    """Its own metrics tell, though those of the other are as they were."""

    def of_both(own: dict[str, float]) -> dict[str, float]:
        return {f"policies/{name}/{key}": value for name in "ab" for key, value in by_policy(name, own).items()}

    def by_policy(name: str, own: dict[str, float]) -> dict[str, float]:
        return own if name == "b" else lively(0.6)

    steps = series(*[of_both(lively(0.6))] * 6, *[of_both(flat(0.0))] * 5)
    found = find_collapse(steps, 5)
    assert found is not None
    assert found.since == 7
    assert found.why.startswith("the policy b: no rollout of steps 7 to 11 got more than 0")
    assert find_collapse(steps[:9], 5) is None
