"""Rollouts that lag behind the learner: both work at once, and every token is known to be whose it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from strop.types import Step
from tests import runs
from tests.runs import SMALL, Story

LAGGING = [*SMALL, "engine.deterministic=false", "loop.staleness=2", "loop.steps=6", "loop.eval_every=0"]


@pytest.fixture(scope="module")
def lagging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap") / "run"
    runs.finish(runs.demo(folder, *LAGGING))
    return folder


@pytest.fixture(scope="module")
def told(lagging: Path) -> Story:
    return runs.story(lagging)


def number(version: str) -> int:
    return int(version.partition(".")[2])


def oldest(told: Story, step: Step) -> int:
    """The oldest version among what a step was trained on."""
    return min(number(v) for id in step.rollouts for turn in told.turns[id] for _, v in turn.versions)


def test_rollouts_lag_behind_but_no_further_than_allowed(told: Story) -> None:
    behind = [step.number - 1 - oldest(told, step) for step in told.steps]
    assert all(0 <= lag <= 2 for lag in behind)
    assert max(behind) > 0, "nothing ever overlapped"
    recorded = [step.metrics["training/off_policy/staleness/max"] for step in told.steps]
    assert recorded == behind


def test_every_token_is_compared_with_the_weights_that_sampled_it(told: Story) -> None:
    """Those of the weights that the step begins with agree with the learner; the others are corrected for."""
    assert sum(step.metrics.get("training/rollout_logprobs_checked", 0) for step in told.steps) > 100
    assert max(step.metrics.get("training/rollout_logprobs_diff_max", 0) for step in told.steps) < 1e-4
    late = next(step for step in told.steps if step.number - 1 > oldest(told, step))
    sampled = sum(len(turn.response_ids) for id in late.rollouts for turn in told.turns[id])
    assert late.metrics.get("training/rollout_logprobs_checked", 0) < sampled
    assert late.metrics["training/off_policy/chi2"] > 0


def test_steps_take_groups_in_sampling_order_and_each_once(lagging: Path, told: Story) -> None:
    taken = [id for step in told.steps for id in step.rollouts]
    assert taken == [f"g{n:06d}.{m}" for n in range(24) for m in range(4)]
    trained = [rollout for rollout in told.rollouts if rollout.mode == "train"]
    assert {rollout.id for rollout in trained} == set(taken), "sampled for steps that never come"
    settings = json.loads((lagging / "config.json").read_text())["algorithm"]["settings"]
    assert settings["correction"] == "token"


@pytest.mark.fault
@pytest.mark.slow
def test_killed_and_resumed_no_rollout_is_lost_and_none_is_sampled_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(runs.demo(folder, *LAGGING), runs.during_step(folder, 4, ended=3))
    before = runs.story(folder)
    ended = {r.id: r.ended for r in before.rollouts if r.status == "succeeded"}
    assert runs.kill_when(resume, runs.committed(folder, lineage=2, step=4))
    runs.finish(resume)
    told = runs.story(folder)
    consumed = Counter(id for step in told.steps for id in step.rollouts)
    assert set(consumed.values()) == {1}
    assert sorted(consumed) == [f"g{n:06d}.{m}" for n in range(24) for m in range(4)]
    assert not any(step.dropped.get(id) == "superseded" for step in told.steps for id in step.rollouts)
    assert {r.id: r.ended for r in told.rollouts if r.id in ended} == ended
    assert all(turn.attempt == 1 for id in ended for turn in told.turns[id])


@pytest.mark.slow
def test_groups_that_teach_nothing_are_replaced(tmp_path: Path) -> None:
    """Up to a limit, by the groups behind them, which the next step then does not take again."""
    folder = tmp_path / "run"
    runs.finish(runs.demo(folder, *SMALL, "loop.groups=3", "loop.max_groups=9", "loop.group_size=2", "loop.steps=3"))
    told = runs.story(folder)
    taken = [id for step in told.steps for id in step.rollouts]
    assert taken == [f"g{n:06d}.{m}" for n in range(len(taken) // 2) for m in range(2)]
    for step in told.steps:
        groups = {id.partition(".")[0] for id in step.rollouts}
        idle = {id.partition(".")[0] for id, reason in step.dropped.items() if reason == "zero_variance"}
        assert len(groups - idle) == 3 or len(groups) == 9
        assert len(groups - idle) <= 3
    assert len(taken) > 18, "none was replaced"
