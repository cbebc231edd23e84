"""What a rollout that failed counts as: by cause, and never as the best of its group."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms import make
from strop.algorithms.rewards import Rewards
from strop.config import AlgorithmConfig, LearnerConfig, load
from strop.errors import ConfigError
from strop.trajectory import assemble
from strop.types import FAILURES, MAX_REWARD, Reward
from tests.unit.algorithms.rollouts import by_turn, credited, sample, turn


def failed(member, *turns, cause="agent_error", **more):
    return sample(member, None, *(turns or [turn()]), status="failed", cause=cause, **more)


def credited_with(failures, *samples, name="grpo", value=None, **more):
    batch = assemble(samples, agents=["main"], budget=1000, failures={**FAILURES, **failures})
    if value is not None:
        batch.entries.value[:] = value
    return batch, make(AlgorithmConfig(name=name, settings=more), LearnerConfig()).assign_credit(batch)


def test_crashing_is_not_the_way_out_of_negative_rewards():
    batch, _ = credited("grpo", sample(0, -1.0, turn()), sample(1, -1.0, turn()), failed(2))
    assert by_turn(batch) == {"g1.0/0": 0.0, "g1.1/0": 0.0, "g1.2/0": 0.0}
    batch, _ = credited("grpo", sample(0, -1.0, turn()), sample(1, 1.0, turn()), failed(2), normalize_std=False)
    assert by_turn(batch) == pytest.approx({"g1.0/0": -2 / 3, "g1.1/0": 4 / 3, "g1.2/0": -2 / 3})


def test_crashing_counts_as_0_beside_positive_rewards():
    batch, _ = credited("grpo", sample(0, 1.0, turn()), sample(1, 1.0, turn()), failed(2), normalize_std=False)
    assert by_turn(batch) == pytest.approx({"g1.0/0": 1 / 3, "g1.1/0": 1 / 3, "g1.2/0": -2 / 3})


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ("zero", [-1.0, -0.5, 1.5]),  # totals 0, 0.5 and 2.5 less their mean
        ("lowest", [-2 / 3, -2 / 3, 4 / 3]),
        (-4.0, [-4 + 1 / 3, 0.5 + 1 / 3, 2.5 + 1 / 3]),
        (7.0, [7 - 10 / 3, 0.5 - 10 / 3, 2.5 - 10 / 3]),
    ],
)
def test_every_cause_counts_as_configured(counts, expected):
    for cause in FAILURES:
        batch, _ = credited_with(
            {cause: counts}, failed(0, cause=cause), sample(1, 0.5, turn()), sample(2, 2.5, turn()), normalize_std=False
        )
        assert list(by_turn(batch).values()) == pytest.approx(expected)


def test_every_cause_can_be_left_out():
    for cause in FAILURES:
        batch, metrics = credited_with(
            {cause: "exclude"}, failed(0, cause=cause), sample(1, 0.0, turn()), sample(2, 1.0, turn()),
            normalize_std=False,
        )  # fmt: skip
        assert list(by_turn(batch).values()) == [0.0, -0.5, 0.5]
        assert metrics[f"filter/failed:{cause}"] == 1


def test_where_nobody_has_a_total_the_lowest_is_left_out_and_0_is_0():
    batch, _ = credited_with({"agent_error": "lowest"}, failed(0), failed(1))
    assert batch.dropped == {"g1.0": "failed:agent_error", "g1.1": "failed:agent_error"}
    assert not batch.counted.any()
    batch, _ = credited_with({}, failed(0), failed(1))
    assert batch.counted.all()
    assert Rewards.of(batch, {"reward": 1.0}).totals.tolist() == [0.0, 0.0]


def test_what_it_got_before_it_failed_does_not_count():
    """Not for the rollout, not for its turns, not for its agent."""
    before = [(5.0, 0), (5.0, "main"), Reward(value=5.0)]
    for counts in ("zero", "lowest", -1.0):
        batch, _ = credited_with(
            {"timeout": counts}, failed(0, turn(), turn(), cause="timeout", rewards=before), sample(1, 0.0, turn()),
            sample(2, 1.0, turn()), normalize_std=False,
        )  # fmt: skip
        advantage = by_turn(batch)
        assert advantage["g1.0/0"] == advantage["g1.0/1"] <= advantage["g1.1/0"] < advantage["g1.2/0"]


def test_where_turns_are_compared_it_counts_as_their_lowest_or_0():
    def advantages(counts, first, second):
        batch, _ = credited_with(
            {"agent_error": counts}, sample(0, 0.0, turn(), rewards=[(first, 0)]),
            sample(1, 0.0, turn(), rewards=[(second, 0)]), failed(2, rewards=[(9.0, 0)]), normalize_std=False,
        )  # fmt: skip
        return list(by_turn(batch).values())

    assert advantages("zero", 4.0, 2.0) == pytest.approx([2.0, 0.0, -2.0])
    assert advantages("lowest", 4.0, 2.0) == pytest.approx([4 / 3, -2 / 3, -2 / 3])
    assert advantages("zero", -4.0, -2.0) == pytest.approx([-2 / 3, 4 / 3, -2 / 3])


REWARDS = st.lists(st.tuples(st.integers(-2, 2).map(float), st.sampled_from([0, 1, "main"])), max_size=3)
MEMBERS = st.lists(st.tuples(st.integers(-2, 2).map(float), st.integers(1, 3), REWARDS), min_size=1, max_size=4)
WAYS = [
    *(("grpo", way) for way in ({}, {"baseline": "agent"}, {"credit": "to_go"}, {"normalize_std": False})),
    *(("grpo", {"baseline": "joint"} | way) for way in ({}, {"credit": "to_go"})),
    ("grpo", {"credit": "to_go", "discount": 0.5, "terminal_share": 0.25}),
    ("rloo", {}), ("dr_grpo", {}), ("reinforce_pp", {}), ("reinforce_pp", {"baseline": True}), ("gigpo", {}),
    ("ppo", {"whiten": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), WAYS)
@pytest.mark.parametrize("counts", ["zero", "lowest"])
@settings(max_examples=60, deadline=None)
@given(members=MEMBERS, spoke=st.integers(1, 3))
def test_failing_is_never_the_best_of_a_group(name, way, counts, members, spoke):
    """By what its tokens get in the mean; where a token gets what came after it, by what the first one gets."""
    others = [
        sample(m + 1, total, *[turn()] * length, rewards=[(v, to) for v, to in given_ if to == "main" or to < length])
        for m, (total, length, given_) in enumerate(members)
    ]
    group = [failed(0, *[turn()] * spoke), *others]
    batch, _ = credited_with({"agent_error": counts}, *group, name=name, value=0.0, **way)
    after = name == "ppo" or (name == "reinforce_pp" and "baseline" not in way)
    rows = [batch.entries.advantage[batch.entries.rollout == s] for s in range(len(group))]
    gets = [float(row[0] if after else row.mean()) for row in rows]
    assert gets[0] <= max(gets[1:]) + 1e-9


@pytest.mark.parametrize("name", ["grpo", "gigpo", "reinforce_pp", "ppo"])
def test_what_is_left_out_says_nothing_of_who_failed(name):
    lost = failed(3, cause="lost_runner")
    for counts, expected in (("zero", 0.0), ("lowest", 1.0)):
        group = [failed(0), sample(1, 1.0, turn()), sample(2, None, turn()), lost]
        batch, metrics = credited_with({"agent_error": counts}, *group, name=name, value=0.0)
        assert np.isfinite(batch.entries.advantage).all()
        assert metrics["critic/rewards/min"] == expected


def test_failures_are_settings():
    config = load(sets=["algorithm.failures.timeout=-1", "algorithm.failures.agent_error=exclude"])
    assert config.algorithm.failures.by_cause() == {**FAILURES, "timeout": -1.0, "agent_error": "exclude"}
    for wrong in ("forgive", "nan", "-inf", "1e300"):
        with pytest.raises(ConfigError, match=r"algorithm\.failures\.timeout"):
            load(sets=[f"algorithm.failures.timeout={wrong}"])
    with pytest.raises(ConfigError, match=r"algorithm\.failures\.late"):
        load(sets=["algorithm.failures.latee=exclude"])


@pytest.mark.parametrize("cause", FAILURES)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_failure_counts_as_keeps_to_the_bound_of_rewards(cause, sign):
    bound = sign * MAX_REWARD
    config = load(sets=[f"algorithm.failures.{cause}={bound}"])
    assert config.algorithm.failures.by_cause()[cause] == bound
    for beyond in (math.nextafter(bound, 2 * bound), int(bound) + sign):
        with pytest.raises(ConfigError, match=rf"algorithm\.failures\.{cause}"):
            load(sets=[f"algorithm.failures.{cause}={beyond}"])


def test_totals_of_failures_are_among_the_metrics():
    _, metrics = credited("grpo", sample(0, -3.0, turn()), sample(1, 1.0, turn()), failed(2))
    assert metrics["critic/rewards/mean"] == pytest.approx(-5 / 3)
    assert np.isfinite(list(metrics.values())).all()
