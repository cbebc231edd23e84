"""Agents of the next step start while the learner works: their calls wait for the new weights; all else is as it was.

Of six steps the third is evaluated: what follows it may not begin before that, nor the second step, since how long the
learner takes is not known before it has taken it once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.types import Step
from tests import runs
from tests.runs import SMALL, Story

STEPS, GROUPS, WORKERS, EVALUATED = 6, 4, 4, 3
AHEAD = [*SMALL, f"loop.steps={STEPS}", f"loop.eval_every={EVALUATED}", "loop.start_ahead=60"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead") / "run"
    runs.finish(runs.demo(folder, *AHEAD))
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> Story:
    return runs.story(folder)


def begun(folder: Path) -> dict[str, float]:
    """When each rollout's first attempt began."""
    with contextlib.closing(sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT rollout, min(started) FROM attempts GROUP BY rollout").fetchall())


def began_ahead(told: Story, began: dict[str, float], step: Step) -> bool:
    """Whether rollouts of a step were begun before the step before it was made: then as many as can run."""
    before = told.steps[step.number - 2].time
    early = sum(began[id] < before for id in step.rollouts)
    assert early in (0, WORKERS)
    return early > 0


def test_agents_of_a_step_start_before_the_one_before_it_is_made(folder: Path, told: Story) -> None:
    began = begun(folder)
    ahead = [step.number for step in told.steps[1:] if began_ahead(told, began, step)]
    assert ahead == [3, 5, 6]


def test_every_token_of_a_step_is_of_the_version_before_it(told: Story) -> None:
    for step in told.steps:
        turns = [turn for id in step.rollouts for turn in told.turns[id]]
        assert {version for turn in turns for _, version in turn.versions} == {f"1.{step.number - 1}"}
        assert all(turn.attempt == 1 for turn in turns)
    first = min(turn.started for id in told.steps[2].rollouts for turn in told.turns[id])
    assert first < told.steps[1].time, "their first calls waited for the weights"


def test_an_evaluation_comes_before_the_rollouts_of_the_next_step(folder: Path, told: Story) -> None:
    began = begun(folder)
    evaluated = [rollout for rollout in told.rollouts if rollout.group.startswith(f"e1.{EVALUATED}-")]
    assert len(evaluated) == 16
    assert all(rollout.status == "succeeded" for rollout in evaluated)
    assert max(rollout.ended or 0.0 for rollout in evaluated) < min(began[id] for id in told.steps[3].rollouts)


def test_nothing_is_begun_for_steps_that_never_come(told: Story) -> None:
    taken = {id for step in told.steps for id in step.rollouts}
    assert {rollout.id for rollout in told.rollouts if rollout.mode == "train"} == taken


@pytest.mark.slow
def test_the_results_are_those_of_agents_that_start_later(folder: Path, tmp_path: Path) -> None:
    runs.finish(runs.demo(tmp_path / "run", *AHEAD, "loop.start_ahead=0"))
    other = runs.story(tmp_path / "run")
    assert not any(began_ahead(other, begun(tmp_path / "run"), step) for step in other.steps[1:])
    runs.same(folder, tmp_path / "run")


def started_ahead(folder: Path, *, made: int) -> Callable[[], bool]:
    """Once agents of the step behind the next one are at work, and `made` steps are made."""

    def ripe() -> bool:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True)) as db:
                done = db.execute("SELECT max(number) FROM steps WHERE NOT superseded").fetchone()[0] or 0
                query = "SELECT count(*) FROM rollouts WHERE mode = 'train' AND status = 'running' AND grp >= ?"
                (early,) = db.execute(query, (f"g{(made + 1) * GROUPS:06d}",)).fetchone()
                return done == made and early > 0
        except sqlite3.Error:
            return False  # not there yet

    return ripe


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("made", [1, 4])
def test_killed_while_agents_are_started_ahead_it_resumes_to_the_same_weights(
    folder: Path, tmp_path: Path, made: int
) -> None:
    place = tmp_path / "run"
    assert runs.kill_when(runs.demo(place, *AHEAD), started_ahead(place, made=made))
    runs.finish(runs.strop("train", "--resume", place, "--json"))
    runs.same(folder, place)
    told = runs.story(place)
    consumed = Counter(id for step in told.steps for id in step.rollouts)
    assert set(consumed.values()) == {1}
    assert not any(rollout.status in ("queued", "running") for rollout in told.rollouts)
    left = [rollout for rollout in told.rollouts if rollout.mode == "train" and rollout.id not in consumed]
    reasons = {id: why for step in told.steps for id, why in step.dropped.items()}
    assert all(reasons[rollout.id] == "superseded" for rollout in left)
    assert runs.metrics(place) == runs.metrics(folder)


@pytest.mark.slow
def test_told_to_stop_meanwhile_it_leaves_what_it_started_to_whoever_resumes(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"

    def stop(processes: list[int]) -> None:
        parent = Path(f"/proc/{processes[0]}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGINT)

    stopped = runs.disturb(runs.demo(place, *AHEAD), started_ahead(place, made=1), stop)
    assert stopped.returncode in (0, 130), stopped.stderr
    assert [step.number for step in runs.story(place).steps] == [1, 2], "the step at hand is finished"
    runs.finish(runs.strop("train", "--resume", place, "--json"))
    runs.same(folder, place)
