"""How good a model is, and which of two is better: figures over tasks, and how far chance alone may have moved them.

    mean@k   what a sample earns: the mean of the k samples of a task
    pass@k   how likely at least one of k samples succeeds, that is, earns `threshold` or more
    best@k   what the best of k samples earns

Each is a mean over tasks that all count the same. From n samples of a task pass@k and best@k are taken for every k of
1, 2, 4, ... n as the mean over all choices of k among the n, which has no bias and wastes no sample.

Intervals hold the true figure 95 times in 100. They come from drawing tasks anew, with repetition (a bootstrap); two
models are compared task by task, so that how hard a task is does not matter. From few tasks such intervals come out too
narrow; they are widened as far as Student's t is wider than the normal distribution.

Left out: intervals for one task, and for fewer tasks than `FEWEST`; where every task earned the very same, an interval
has no width, which says nothing about other tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from strop.errors import ConfigError, TaskError

Floats = NDArray[np.float64]
Values = Mapping[str, Sequence[float]]
"""One reward on one split: task -> what each of its samples earned. All tasks have the same number of samples."""

FEWEST = 6
"""From fewer tasks nothing follows: five tasks of five agree by chance alone more than one time in twenty."""
DRAWS = 10_000
LEVEL = 0.95


class Score(Struct, frozen=True):
    """A figure, and the interval that holds the true one; no interval where there are too few tasks."""

    value: float
    low: float | None = None
    high: float | None = None


class Difference(Score, frozen=True):
    """The same of one figure minus another. As long as 0 lies within the interval, chance alone explains it."""

    zero_within: bool | None = None


# -- one model ---------------------------------------------------------------------------------------------------------


def scores(values: Values, *, threshold: float = 1.0, seed: int = 0) -> dict[str, Score]:
    """Every measure with its interval.

    >>> {name: score.value for name, score in scores({"a": [1, 0], "b": [0, 0]}).items()}
    {'mean@2': 0.25, 'pass@1': 0.25, 'pass@2': 0.5, 'best@2': 0.5}
    """
    return {name: score(found, seed) for name, found in compute_measures(values, threshold).items()}


def compute_measures(values: Values, threshold: float = 1.0) -> dict[str, Floats]:
    """Every measure's value on every task, in the order of the tasks."""
    (n,) = {len(samples) for samples in values.values()}
    ks = sorted({n, *(2**i for i in range(n.bit_length()))})
    wins = [sum(value >= threshold for value in samples) for samples in values.values()]
    found = {f"mean@{n}": [sum(samples) / n for samples in values.values()]}
    found |= {f"pass@{k}": [pass_at(n, c, k) for c in wins] for k in ks}
    found |= {f"best@{k}": [average_best(samples, k) for samples in values.values()] for k in ks[1:]}
    return {name: np.array(per_task, float) for name, per_task in found.items()}


def pass_at(n: int, c: int, k: int) -> float:
    """The share of choices of k among n samples, c of them successes, that hold a success.

    >>> pass_at(4, 1, 1), pass_at(4, 1, 2), pass_at(4, 0, 4)
    (0.25, 0.5, 0.0)
    """
    assert 0 <= c <= n >= k >= 1, (n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def average_best(samples: Sequence[float], k: int) -> float:
    """The best of k samples, on average over all choices of k among those given: the i-th smallest (from 0) is the
    best wherever the other k - 1 are among the i below it.

    >>> average_best([0.0, 0.5, 1.0], 2)
    0.8333333333333333
    """
    n = len(samples)
    assert 1 <= k <= n, (n, k)
    return sum(value * (comb(i, k - 1) / comb(n, k)) for i, value in enumerate(sorted(samples)))


# -- two models --------------------------------------------------------------------------------------------------------


def compare(one: Values, other: Values, *, threshold: float = 1.0, seed: int = 0) -> dict[str, Difference]:
    """Every measure of `one` minus that of `other`, task by task, with its interval. Raises `TaskError` where they were
    not given the same tasks.

    >>> compare({"a": [1], "b": [0]}, {"b": [0], "a": [0]})["mean@1"]
    Difference(value=0.5, low=None, high=None, zero_within=None)
    """
    if one.keys() != other.keys():
        odd = sorted(one.keys() ^ other.keys())
        raise TaskError(
            f"the two were evaluated on different tasks ({len(odd)} are in one of them only, such as {odd[0]!r}): "
            "evaluate both on the same ones"
        )
    (n,), (m,) = ({len(samples) for samples in values.values()} for values in (one, other))
    if n != m:
        raise ConfigError(f"one was evaluated with {n} samples a task, the other with {m}: give both the same -k")
    mine, theirs = compute_measures(one, threshold), compute_measures({task: other[task] for task in one}, threshold)
    return {name: _difference(score(mine[name] - theirs[name], seed)) for name in mine}


def _difference(found: Score) -> Difference:
    low, high, little = found.low, found.high, 1e-12  # sums of numbers that cancel out end a little beside 0
    within = None if low is None or high is None else low <= little and high >= -little
    return Difference(found.value, low, high, within)


# -- chance ------------------------------------------------------------------------------------------------------------


def score(per_task: Floats, seed: int = 0) -> Score:
    """The mean over tasks, with its interval. The same seed gives the same interval."""
    n, value = len(per_task), float(per_task.mean())
    if n < FEWEST:
        return Score(value)
    rng, means = np.random.default_rng(seed), np.empty(DRAWS)
    at_once = max(1, 1_000_000 // n)  # of 8 bytes each
    for start in range(0, DRAWS, at_once):
        part = means[start : start + at_once]
        part[:] = per_task[rng.integers(n, size=(len(part), n))].mean(axis=1)
    outside = compute_tail(n)
    low, high = np.quantile(means, [outside, 1 - outside])
    return Score(value, float(low), float(high))


def compute_tail(n: int) -> float:
    """The share of drawn means to leave out at each end, for n tasks: what lies beyond Student's t of n - 1 degrees,
    and a little further since drawing n of n spreads less than the tasks do.

    >>> round(compute_tail(10**9), 4), round(compute_tail(10), 4)
    (0.025, 0.0086)
    """
    return NormalDist().cdf(-compute_quantile(n - 1) * sqrt(n / (n - 1)))


def compute_quantile(degrees: int) -> float:
    """The quantile of Student's t that leaves half of 1 - LEVEL above it: the normal one, and the first terms by which
    it differs. From 5 degrees on the error is below two parts in a thousand.

    >>> round(compute_quantile(10), 2), round(compute_quantile(30), 2)
    (2.23, 2.04)
    """
    z, v = NormalDist().inv_cdf((1 + LEVEL) / 2), float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
