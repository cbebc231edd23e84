"""What evaluations say, in figures and in plain sentences. Pure: strop/run/evaluate.py runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from strop.config import Config
from strop.errors import AgentError
from strop.monitor.metrics import weigh_parts
from strop.monitor.statistics import FEWEST, Difference, Score, compare, scores

Way = Literal["trained", "deployed"]
"""Shown the history that the policy is trained with, or the one that an ordinary server would show it."""


class Evaluation(Struct, kw_only=True):
    """One model, one way.

    `number` counts the models from 1, `weights` is where this one was found. `rewards` has split -> reward -> task ->
    one value per sample; what failed earned 0 and is counted in `failed`, by cause. Of `turns` model calls, `branches`
    could not go on from what was said before, by reason. `scores` have metrics' names: val-core/test/reward/pass@4.
    """

    number: int
    model: str
    weights: str
    way: Way
    history: Literal["sampled", "template"]
    folder: str
    seconds: float = 0.0
    failed: dict[str, int] = {}
    turns: int = 0
    branches: dict[str, int] = {}
    rewards: dict[str, dict[str, dict[str, list[float]]]] = {}
    scores: dict[str, Score] = {}

    @property
    def name(self) -> str:
        return self.model if self.way == "trained" else f"{self.model} as deployed"


class Comparison(Struct, kw_only=True):
    """Every score of one evaluation minus that of another; both by their place in `EvaluationReport.evaluations`."""

    one: int
    other: int
    differences: dict[str, Difference]


class EvaluationReport(Struct, kw_only=True):
    """What came of it, also written as evaluation.json. `verdict` is about one of the scores: `measure` of `reward` on
    `split`. Splits that were drawn greedily are called that in addition: test-greedy."""

    agent: str
    tasks: str | dict[str, str]
    seed: int
    samples: int
    threshold: float
    split: str
    reward: str
    measure: str
    evaluations: list[Evaluation]
    comparisons: list[Comparison]
    warnings: list[str] = []
    verdict: str = ""
    folder: str = ""
    seconds: float = 0.0

    @property
    def metric(self) -> str:
        return f"val-core/{self.split}/{self.reward}/{self.measure}"

    @property
    def about(self) -> str:
        return f"{self.reward}, {self.measure}, on {self.split}"


def report(config: Config, done: list[Evaluation], *, samples: int, threshold: float = 1.0) -> EvaluationReport:
    """Score evaluations of the same tasks, and compare those that belong together: the first model with each of the
    others, shown its history the same way; each model as deployed with itself as trained."""
    fill(done, samples)
    for one in done:
        one.scores = {
            f"val-core/{split}/{name}/{measure}": score
            for split, rewards in one.rewards.items()
            for name, values in rewards.items()
            for measure, score in scores(values, threshold=threshold, seed=config.seed).items()
        }
    pairs = [
        (i, j)
        for i, one in enumerate(done)
        for j, other in enumerate(done)
        if (one.number == 1 < other.number and one.way == other.way)
        or (one.number == other.number and (one.way, other.way) == ("deployed", "trained"))
    ]
    split = next(iter(done[0].rewards))
    found = EvaluationReport(
        agent=config.agent,
        tasks=config.tasks,
        seed=config.seed,
        samples=samples,
        threshold=threshold,
        split=split,
        reward=choose_reward(config, list(done[0].rewards[split])),
        measure=f"mean@{samples}",
        evaluations=done,
        comparisons=[
            Comparison(one=i, other=j, differences=differences(done[i], done[j], threshold, config.seed))
            for i, j in pairs
        ],
    )
    found.warnings = [*failures(done), *describe_deployment(found)]
    found.verdict = verdict(found)
    return found


def fill(done: Sequence[Evaluation], samples: int) -> None:
    """A reward that somebody gave is 0 for those who did not give it."""
    for split in done[0].rewards:
        given = {name: values for one in done for name, values in one.rewards[split].items()}
        if not given:
            raise AgentError(f"the agent gave no reward on {split}: return one, or name a function with --reward")
        for one in done:
            here = one.rewards[split]
            one.rewards[split] = {
                name: here.get(name) or {task: [0.0] * samples for task in values}
                for name, values in sorted(given.items())
            }


def differences(one: Evaluation, other: Evaluation, threshold: float, seed: int) -> dict[str, Difference]:
    return {
        f"val-core/{split}/{name}/{measure}": difference
        for split, rewards in one.rewards.items()
        for name, values in rewards.items()
        for measure, difference in compare(values, other.rewards[split][name], threshold=threshold, seed=seed).items()
    }


def choose_reward(config: Config, names: Sequence[str]) -> str:
    """The reward that a verdict is about: one that training would count, if it was given, or else one of an agent's."""
    weights = config.algorithm.rewards
    agents = (name for name in names if weigh_parts({name: 0.0}, weights) is not None)
    return next((name for name in (*weights, "reward", *agents) if name in names), names[0])


# -- sentences ---------------------------------------------------------------------------------------------------------


def verdict(found: EvaluationReport) -> str:
    one, split = found.evaluations[0], found.split
    between = next((c for c in found.comparisons if found.evaluations[c.other].number > 1), None)
    between = between or next(iter(found.comparisons), None)
    if between is None:
        score = one.scores[found.metric]
        sure = few(one, split) if score.low is None else f"with 95 % confidence {format_interval(score)}"
        return f"{one.name} scores {score.value:.3f} ({found.about}); {sure}."
    one, other = found.evaluations[between.one], found.evaluations[between.other]
    difference = between.differences[found.metric]
    if one.rewards[split][found.reward] == other.rewards[split][found.reward]:
        return f"{one.name} and {other.name} earned the very same on every task ({found.about})."
    more = f"{abs(difference.value):.3f} {'less' if difference.value < 0 else 'more'} than"
    said = f"{one.name} scores {more} {other.name} ({found.about}); "
    if difference.zero_within is None:
        return f"{said}{few(one, split)}."
    said += f"with 95 % confidence the difference is {format_interval(difference)}"
    if difference.zero_within:
        return f"{said}, and 0 lies within that: these tasks do not tell the two apart."
    return f"{said}, and 0 lies outside of that: it is {'better' if difference.value > 0 else 'worse'}, not just lucky."


def failures(done: Sequence[Evaluation]) -> list[str]:
    return [
        f"{one.name}: {sum(one.failed.values())} rollouts failed and count as 0 "
        f"({', '.join(f'{cause} {count}' for cause, count in one.failed.items())})"
        for one in done
        if one.failed
    ]


def describe_deployment(found: EvaluationReport) -> list[str]:
    """Where a model is shown another history once it is deployed, or fares differently."""
    said: list[str] = []
    for pair in found.comparisons:
        one, other = found.evaluations[pair.one], found.evaluations[pair.other]
        if one.number != other.number:
            continue
        rewritten, difference = one.branches.get("template_rewrote", 0), pair.differences[found.metric]
        if not rewritten and difference.zero_within is not False:
            continue
        sure = (
            few(one, found.split) if difference.low is None else f"with 95 % confidence {format_interval(difference)}"
        )
        said.append(
            f"{one.model} as deployed differs: in {rewritten} of {one.turns} model calls the chat template writes what "
            f"it said before otherwise than it said it; its score ({found.about}) changes by {difference.value:+.3f}, "
            f"{sure}; policy.history=template trains it the way it is deployed"
        )
    return said


def few(one: Evaluation, split: str) -> str:
    count = len(next(iter(one.rewards[split].values())))
    return f"{count} task{'s are' if count > 1 else ' is'} too few to say how sure that is: {FEWEST} are the least"


def format_interval(score: Score) -> str:
    """
    >>> format_interval(Score(0.5, 0.25, 0.75))
    'between 0.250 and 0.750'
    """
    return f"between {score.low:.3f} and {score.high:.3f}"
