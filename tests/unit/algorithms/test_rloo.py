import pytest

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig
from tests.unit.algorithms.rollouts import by_turn, credited, sample, turn


def test_a_rollout_is_compared_with_the_others():
    totals = [1.0, 0.0, 0.5, 0.25]
    batch, _ = credited("rloo", *(sample(k, r, *[turn(2)] * (k + 1)) for k, r in enumerate(totals)))
    expected = {
        f"g1.{k}/{t}": r - (sum(totals) - r) / 3 for k, r in enumerate(totals) for t in range(k + 1)
    }  # fmt: skip
    assert by_turn(batch) == pytest.approx(expected)


def test_what_is_dropped_is_in_the_baseline():
    batch, _ = credited(
        "rloo", sample(0, 1.0, turn()), sample(1, 0.0, turn()), sample(2, 1.0, turn(60)), sample(3, 1.0), budget=50
    )
    assert batch.dropped == {"g1.2": "over_budget", "g1.3": "empty"}
    assert by_turn(batch) == pytest.approx({"g1.0/0": 1 - 2 / 3, "g1.1/0": -1.0})


def test_what_teaches_nothing_is_filtered():
    batch, metrics = credited(
        "rloo", sample(0, 1.0, turn()), sample(0, 1.0, turn(), group="g2"), sample(1, 1.0, turn(), group="g2")
    )
    assert (metrics["filter/group_of_one"], metrics["filter/zero_variance"]) == (1, 2)
    assert not batch.entries.weight.any()


def test_the_rewards_of_turns_are_told_apart():
    batch, _ = credited("rloo", sample(0, 1.0, turn(), turn(), rewards=[(1.0, 0), (0.0, 1)]), sample(1, 1.0, turn()))
    assert by_turn(batch) == {"g1.0/0": 0.75, "g1.0/1": -0.25, "g1.1/0": 0.0}


def test_dr_grpo_divides_neither_by_deviation_nor_by_length():
    samples = [sample(0, 1.0, turn(2), turn(1)), sample(1, 0.0, turn(1))]
    batch, _ = credited("dr_grpo", *samples, horizon=10)
    assert by_turn(batch) == {"g1.0/0": 0.5, "g1.0/1": 0.5, "g1.1/0": -0.5}
    assert batch.entries.weight.tolist() == pytest.approx([1 / 20] * 4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "gigpo"])
def test_no_critic_is_asked_for(name):
    assert make(AlgorithmConfig(name=name), LearnerConfig()).needs == frozenset()
