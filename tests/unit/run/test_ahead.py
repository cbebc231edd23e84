"""When agents of the next step may start while the learner works."""

from __future__ import annotations

from typing import Any

import pytest

from strop import config as configs
from strop.monitor.console import Silent
from strop.run.ahead import may_start_ahead
from strop.run.state import Run
from strop.types import Step, Task


def make_step(number: int, learning: float = 2.0, lineage: int = 1) -> Step:
    metrics = {"timing_s/step": 5.0 + learning, "timing_s/gen": 5.0}
    rollouts = [f"g{2 * number - 2 + n:06d}.{member}" for n in range(2) for member in range(2)]
    return Step(lineage=lineage, number=number, rollouts=rollouts, metrics=metrics, time=0.0)


def make_run(*sets: str, made: int = 1, learning: float = 2.0, **given: Any) -> Run:
    """A run of six steps of which so many are made, evaluated every third, that nothing hinders."""
    config = configs.load(sets=["loop.steps=6", "loop.groups=2", "loop.group_size=2", "loop.eval_every=3", *sets])
    nothing: dict[str, Any] = dict.fromkeys(("folder", "store", "gateway", "pool", "writers", "engines", "learners"))
    steps = [make_step(n + 1, learning) for n in range(made)]
    tasks = [Task(id="a", split="train"), Task(id="b", split="test")]
    return Run(config=config, tasks=tasks, view=Silent(), policies={}, steps=steps, step=made, **{**nothing, **given})


def test_while_a_step_is_made_that_nothing_else_follows():
    run = make_run()
    assert may_start_ahead(run)
    after = [rollout.id for rollout in run.next_rollouts(origin=run.lineage, skip=2)]
    run.steps.append(make_step(2))
    run.step, run.versions = 2, run.versions_of(run.steps[-1])
    assert [rollout.id for rollout in run.next_rollouts()] == after, "those that the next step would queue itself"


def test_a_later_lineage_names_what_it_samples_after_itself():
    run = make_run(lineage=3, versions=["1.1"])
    after = [rollout.id for rollout in run.next_rollouts(origin=run.lineage, skip=2)]
    assert after == ["g000004~3.0", "g000004~3.1", "g000005~3.0", "g000005~3.1"]
    run.steps.append(made := make_step(2, lineage=3))
    run.step, run.versions = 2, run.versions_of(made)
    assert [rollout.id for rollout in run.next_rollouts()] == after


@pytest.mark.parametrize(
    "run",
    [
        make_run(made=0),
        make_run(learning=10.5),
        make_run("loop.start_ahead=0"),
        make_run("loop.start_ahead=0", learning=0.0),
        make_run(made=2),
        make_run(made=5),
        make_run("loop.staleness=1"),
        make_run("loop.max_groups=4"),
        make_run(data=object()),
        make_run(opponents=[object()]),
        make_run(lineage=2, superseded=[make_step(2)]),
    ],
    ids=[
        "nobody knows how long it takes",
        "it takes long",
        "never",
        "never, however fast",
        "an evaluation comes first",
        "it is the last step",
        "they do anyway",
        "the next groups are not known",
        "stored data",
        "opponents are loaded anew",
        "the weights may be those of a step before",
    ],
)
def test_not_where(run: Run):
    assert not may_start_ahead(run)


def test_not_once_the_run_was_told_to_stop():
    run = make_run()
    run.stop.set()
    assert not may_start_ahead(run)


def test_evaluations_that_there_are_none_of_hinder_nobody():
    assert may_start_ahead(make_run("loop.eval_splits=[]", made=2))
