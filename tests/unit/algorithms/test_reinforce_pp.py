import numpy as np
import pytest

from tests.unit.algorithms.rollouts import by_turn, credited, sample, turn


def scaled(values):
    values = np.array(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def test_returns_are_scaled_over_the_batch_whatever_the_groups():
    totals = [3.0, 1.0, 0.0, 0.0, 2.0]
    samples = [sample(k, r, *[turn(3)] * (k + 1), group=f"g{k % 2}") for k, r in enumerate(totals)]
    batch, _ = credited("reinforce_pp", *samples, normalize_over="rollouts")
    expected = scaled(totals)
    assert by_turn(batch) == pytest.approx(
        {f"g{k % 2}.{k}/{t}": expected[k] for k in range(5) for t in range(k + 1)}
    )  # fmt: skip
    batch, _ = credited("reinforce_pp", *samples)
    tokens = scaled(np.repeat(totals, [3 * (k + 1) for k in range(5)]))
    in_order = [s.rollout.member for s in batch.samples]
    assert batch.entries.advantage.tolist() == pytest.approx(
        [tokens[3 * sum(range(1, k + 1))] for k in in_order for _ in range(3 * (k + 1))]
    )


def test_the_groups_mean_is_taken_off_first():
    totals = {"g1": [1.0, 0.0], "g2": [10.0, 10.5, 11.0]}
    samples = [sample(k, r, *[turn(2)] * (k + 1), group=g) for g, rs in totals.items() for k, r in enumerate(rs)]
    batch, _ = credited("reinforce_pp", *samples, baseline=True, normalize_over="rollouts")
    expected = scaled([0.5, -0.5, -0.5, 0.0, 0.5])
    assert [by_turn(batch)[f"{g}.{k}/0"] for g, rs in totals.items() for k in range(len(rs))] == pytest.approx(
        expected.tolist()
    )


def test_a_group_of_one_trains_without_a_baseline_and_not_with_one():
    samples = [
        sample(0, 1.0, turn(), group="g1"),
        sample(0, 0.0, turn(), group="g2"),
        sample(1, 1.0, turn(), group="g2"),
    ]
    batch, _ = credited("reinforce_pp", *samples)
    assert batch.dropped == {}
    assert by_turn(batch)["g1.0/0"] > 0
    batch, _ = credited("reinforce_pp", *samples, baseline=True)
    assert batch.dropped == {"g1.0": "group_of_one"}


def test_a_turns_reward_reaches_it_and_those_before():
    batch, _ = credited(
        "reinforce_pp", sample(0, 0.0, turn(), turn(), turn(), rewards=[(1.0, 1)]), sample(1, 0.0, turn())
    )
    first, second, third, other = by_turn(batch).values()
    assert first == second > third == other


def test_what_is_dropped_is_in_the_scale():
    samples = [sample(0, 1.0, turn()), sample(1, 0.0, turn()), sample(2, 5.0, turn(60)), sample(3, 1.0)]
    for more in ({}, {"baseline": True}):
        batch, _ = credited("reinforce_pp", *samples, budget=50, normalize_over="rollouts", **more)
        assert list(by_turn(batch).values()) == pytest.approx(scaled([1.0, 0.0, 5.0, 1.0])[:2].tolist())


def test_a_batch_in_which_all_is_equal_teaches_nothing():
    batch, metrics = credited("reinforce_pp", sample(0, 1.0, turn()), sample(0, 1.0, turn(), group="g2"))
    assert metrics["filter/zero_variance"] == 2
    assert not batch.entries.weight.any()
