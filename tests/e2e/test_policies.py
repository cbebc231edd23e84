"""Two policies in one run: each has its model, its learner and its engine, and learns from its own agent's turns."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests import runs
from tests.runs import SMALL, Story

TWO = [
    *SMALL,
    *("loop.steps=3", "loop.groups=3", "loop.group_size=4", "loop.checkpoint_every=2", "loop.eval_splits=[]"),
    f"agent={Path(__file__).parents[1] / 'two_agents.py'}:agent",
    *("policies.writer.learner.optim.lr=0.0003", "policies.critic.agents=['crit*']"),
    *("policies.critic.learner.optim.lr=0.001", "policies.critic.algorithm.name=rloo"),
]
NAMES = ("writer", "critic")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("two") / "run"
    runs.finish(runs.demo(folder, *TWO), timeout=900)
    return folder


@pytest.fixture(scope="module")
def told(two: Path) -> Story:
    return runs.story(two)


def weights(folder: Path, step: str = "step-000003-1") -> dict[str, str]:
    parts = {name: folder / "checkpoints" / step / name / "model.safetensors" for name in NAMES}
    return {name: hashlib.sha256(part.read_bytes()).hexdigest() for name, part in parts.items()}


def test_every_step_has_one_version_and_a_checkpoint_with_a_part_for_each(two: Path, told: Story) -> None:
    assert [step.version for step in told.steps] == ["1.1", "1.2", "1.3"]
    assert [step.checkpoint for step in told.steps] == [None, "step-000002-1", "step-000003-1"]
    before, after = weights(two, "step-000002-1"), weights(two)
    assert len({*before.values(), *after.values()}) == 4  # both changed, and they are not each other's
    assert json.loads((two / "checkpoints/best/writer/strop.json").read_text())["version"].startswith("1.")
    assert {path.name for path in (two / "policies").iterdir()} == set(NAMES)


def test_an_agent_is_answered_by_its_policy(told: Story) -> None:
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert {(turn.agent, turn.policy) for turn in turns} == {(name, name) for name in NAMES}
    assert {version for turn in turns for _, version in turn.versions} == {"1.0", "1.1", "1.2"}


def test_each_learns_from_its_own_turns_alone(told: Story) -> None:
    """The learner found every token of its own policy, and no other, as likely as the engine had said."""
    for step in told.steps:
        turns = [turn for id in step.rollouts for turn in told.turns[id]]
        for name in NAMES:
            sampled = sum(len(turn.response_ids) for turn in turns if turn.policy == name)
            assert step.metrics[f"policies/{name}/training/rollout_logprobs_checked"] == sampled
            assert step.metrics[f"policies/{name}/training/rollout_logprobs_diff_max"] < 1e-4
            assert f"policies/{name}/actor/grad_norm" in step.metrics
        assert "actor/grad_norm" not in step.metrics
        assert step.metrics["training/rollout_logprobs_checked"] == sum(len(turn.response_ids) for turn in turns)
        assert "critic/rewards/mean" in step.metrics


@pytest.mark.fault
def test_killed_it_goes_on_to_the_same_weights(two: Path, tmp_path: Path) -> None:
    """Killed before its first checkpoint, and again after it."""
    folder = tmp_path / "run"
    assert runs.kill_when(runs.demo(folder, *TWO), runs.during_step(folder, 2, ended=2), limit=600)
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(resume, runs.during_step(folder, 3, ended=2), limit=600)
    runs.finish(resume, timeout=900)
    mine, theirs = runs.story(folder), runs.story(two)
    assert mine.tokens() == theirs.tokens()
    assert [step.digest for step in mine.steps] == [step.digest for step in theirs.steps]
    assert None not in [step.digest for step in mine.steps]
    assert weights(folder, str(mine.steps[-1].checkpoint)) == weights(two)
