"""Scores against a plain count over all choices, and intervals against the truth of many made-up evaluations."""

from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError, TaskError
from strop.monitor.metrics import check
from strop.monitor.statistics import (
    FEWEST,
    average_best,
    compare,
    compute_measures,
    compute_quantile,
    pass_at,
    score,
    scores,
)

SAMPLES = st.lists(st.floats(-2, 2), min_size=1, max_size=7)


@given(SAMPLES, st.floats(-1, 1))
def test_pass_and_best_are_means_over_all_choices(samples: list[float], threshold: float) -> None:
    n, wins = len(samples), [value >= threshold for value in samples]
    for k in range(1, n + 1):
        assert pass_at(n, sum(wins), k) == pytest.approx(mean(any(some) for some in combinations(wins, k)))
        assert average_best(samples, k) == pytest.approx(mean(max(some) for some in combinations(samples, k)))


def test_many_samples_do_not_overflow() -> None:
    assert pass_at(10_000, 1, 5_000) == pytest.approx(0.5)
    assert average_best([0.0] * 5_000 + [1.0] * 5_000, 1) == pytest.approx(0.5)


def test_one_sample_is_the_sample() -> None:
    found = scores({"a": [0.25], "b": [1.0]})
    assert {name: at.value for name, at in found.items()} == {"mean@1": 0.625, "pass@1": 0.5}


def test_measures_by_hand() -> None:
    """Six samples: 1, 2, 4 and all six of them; a success is half a point."""
    found = compute_measures({"a": [0.0, 0.5, 0.0, 0.0, 0.0, 0.0], "b": [1.0] * 6}, threshold=0.5)
    assert list(found) == ["mean@6", "pass@1", "pass@2", "pass@4", "pass@6", "best@2", "best@4", "best@6"]
    assert list(found["pass@2"]) == pytest.approx([1 / 3, 1.0])
    assert list(found["best@6"]) == [0.5, 1.0]
    check(f"val-core/test/reward/{name}" for name in found)


def test_a_comparison_is_made_task_by_task() -> None:
    """Tasks differ far more than the two models do, and the order of tasks does not matter."""
    one = {f"t{i}": [float(i), float(i) + 0.5] for i in range(40)}
    other = {task: [value - 0.25 for value in samples] for task, samples in reversed(one.items())}
    found = compare(one, other)["mean@2"]
    assert (found.value, found.low, found.high, found.zero_within) == (0.25, 0.25, 0.25, False)
    back = compare(other, one)["mean@2"]
    assert (back.value, back.zero_within) == (-0.25, False)
    apart = scores(one)["mean@2"]
    assert apart.low is not None
    assert apart.value - apart.low > 2  # which unpaired would drown it


def test_the_same_has_no_difference() -> None:
    values = {f"t{i}": [0.1 * i, 0.3] for i in range(9)}
    for found in compare(values, values).values():
        assert (found.value, found.low, found.high, found.zero_within) == (0.0, 0.0, 0.0, True)


def test_other_tasks_or_samples_are_refused() -> None:
    with pytest.raises(TaskError, match=r"different tasks \(2 are in one of them only, such as 'b'\)"):
        compare({"a": [1.0], "b": [1.0]}, {"a": [1.0], "c": [1.0]})
    with pytest.raises(ConfigError, match="1 samples a task, the other with 2"):
        compare({"a": [1.0]}, {"a": [1.0, 0.0]})


def test_too_few_tasks_have_no_interval() -> None:
    assert score(np.ones(FEWEST - 1)).low is None
    assert compare({"a": [1.0]}, {"a": [0.0]})["mean@1"].zero_within is None
    assert score(np.arange(FEWEST, dtype=float)).low is not None


def test_the_seed_fixes_the_interval() -> None:
    values = np.random.default_rng(1).random(50)
    assert score(values, 3) == score(values, 3) != score(values, 4)
    low, high = score(values, 3).low, score(values, 3).high
    assert low is not None
    assert high is not None
    assert low < values.mean() < high
    wide = 1.96 * values.std(ddof=1) / 50**0.5
    assert (high - low) / 2 == pytest.approx(wide, rel=0.15)


@pytest.mark.parametrize(("degrees", "known"), [(5, 2.5706), (9, 2.2622), (20, 2.0860), (120, 1.9799)])
def test_student_by_the_table(degrees: int, known: float) -> None:
    assert compute_quantile(degrees) == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("n", [8, 30])
def test_intervals_hold_the_truth_as_often_as_they_say(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that are equally good: 0 lies outside of the interval about one time in twenty, with few tasks too.
    Plain percentiles leave it out about one time in ten at n = 8."""
    monkeypatch.setattr("strop.monitor.statistics.DRAWS", 2000)
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(600):
        mine, theirs = (rng.random((n, 2)) < 0.5 for _ in range(2))
        found = score(mine.mean(axis=1) - theirs.mean(axis=1), int(rng.integers(1 << 30)))
        assert found.low is not None
        assert found.high is not None
        wrong += not found.low <= 0 <= found.high
    assert 0.01 < wrong / 600 < 0.075
