import pytest

from tests.unit.algorithms.rollouts import by_turn, credited, sample, turn

START, ROOM, HALL = [1, 2], [1, 2, 5, 5, 8], [1, 2, 6, 6, 9]


def walk(member, total, *prompts, **more):
    return sample(member, total, *(turn(prompt=prompt, ids=[7]) for prompt in prompts), **more)


def test_turns_are_compared_with_those_in_the_same_state():
    batch, _ = credited(
        "gigpo", walk(0, 1.0, START, ROOM), walk(1, 0.0, START, ROOM, HALL), walk(2, 1.0, START, HALL),
        normalize_std=False, discount=0.5, step_weight=2.0,
    )  # fmt: skip
    # Returns. At the start: 1/2, 0, 1/2. In the room: 1, 0. In the hall: 0, 1.
    expected = {
        "g1.0/0": 1 / 3 + 2 * (1 / 2 - 1 / 3),
        "g1.0/1": 1 / 3 + 2 * 0.5,
        "g1.1/0": -2 / 3 + 2 * (0 - 1 / 3),
        "g1.1/1": -2 / 3 - 2 * 0.5,
        "g1.1/2": -2 / 3 - 2 * 0.5,
        "g1.2/0": 1 / 3 + 2 * (1 / 2 - 1 / 3),
        "g1.2/1": 1 / 3 + 2 * 0.5,
    }
    assert by_turn(batch) == pytest.approx(expected)


def test_a_state_that_one_rollout_saw_adds_nothing():
    batch, _ = credited(
        "gigpo", walk(0, 1.0, [1], ROOM, ROOM), walk(1, 0.0, [2], HALL), normalize_std=False, discount=0.5
    )
    assert by_turn(batch) == {"g1.0/0": 0.5, "g1.0/1": 0.5, "g1.0/2": 0.5, "g1.1/0": -0.5, "g1.1/1": -0.5}


def test_a_rollout_counts_once_per_state():
    """The first went in circles: back in the same room four times. Its returns there count as one, their mean."""
    batch, _ = credited(
        "gigpo", walk(0, 1.0, [1], ROOM, ROOM, ROOM, ROOM), walk(1, 0.0, [2], ROOM), normalize_std=False, discount=0.5
    )
    mean = ((1 / 8 + 1 / 4 + 1 / 2 + 1) / 4 + 0) / 2
    assert by_turn(batch)["g1.1/1"] == pytest.approx(-0.5 - mean)
    assert by_turn(batch)["g1.0/4"] == pytest.approx(0.5 + 1 - mean)


def test_states_of_other_groups_are_other_states():
    batch, _ = credited(
        "gigpo", walk(0, 1.0, [1], ROOM), walk(1, 0.0, [2]), walk(0, 0.0, [3], ROOM, group="g2"),
        walk(1, 1.0, [4], group="g2"), normalize_std=False, discount=0.5,
    )  # fmt: skip
    assert by_turn(batch)["g1.0/1"] == 0.5


def test_an_observation_is_what_is_new_since_the_turn_before():
    """Both came to 8, by other ways: as prompts the states differ, as observations they are the same."""
    one = [[1], [1, 7, 4], [1, 7, 4, 7, 8, 8]]
    other = [[1], [1, 7, 8, 8]]
    steps = {}
    for anchor in ("prompt", "observation"):
        batch, _ = credited(
            "gigpo", walk(0, 1.0, *one), walk(1, 0.0, *other), normalize_std=False, discount=1.0, anchor=anchor
        )
        steps[anchor] = by_turn(batch)
    assert steps["prompt"] == {"g1.0/0": 1.0, "g1.0/1": 0.5, "g1.0/2": 0.5, "g1.1/0": -1.0, "g1.1/1": -0.5}
    assert steps["observation"] == {"g1.0/0": 1.0, "g1.0/1": 0.5, "g1.0/2": 1.0, "g1.1/0": -1.0, "g1.1/1": -1.0}


def test_equal_outcomes_reached_by_longer_and_shorter_ways_teach():
    batch, _ = credited("gigpo", walk(0, 1.0, START), walk(1, 1.0, START, ROOM), normalize_std=False, discount=0.5)
    assert batch.dropped == {}
    assert by_turn(batch) == {"g1.0/0": 0.25, "g1.1/0": -0.25, "g1.1/1": 0.0}
    batch, metrics = credited("gigpo", walk(0, 1.0, START), walk(1, 1.0, START, ROOM), discount=1.0)
    assert metrics["filter/zero_variance"] == 2


def test_deviations_are_those_of_the_state():
    batch, _ = credited("gigpo", walk(0, 1.0, [1], ROOM), walk(1, 0.0, [2], ROOM), walk(2, 0.5, [3]), discount=1.0)
    assert by_turn(batch)["g1.0/1"] == pytest.approx(1.0 + 0.5 / 0.5**0.5, abs=1e-4)
    assert by_turn(batch)["g1.2/0"] == 0.0


def test_states_are_compared_before_anything_is_dropped():
    batch, _ = credited(
        "gigpo", walk(0, 1.0, ROOM), walk(1, 0.0, ROOM), sample(2, 0.0, turn(60, prompt=ROOM)),
        budget=50, normalize_std=False,
    )  # fmt: skip
    assert batch.dropped == {"g1.2": "over_budget"}
    assert by_turn(batch) == pytest.approx({"g1.0/0": 2 * 2 / 3, "g1.1/0": -2 / 3})
