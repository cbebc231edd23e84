"""Two adapters and the plain model behind three agents of one run: one model in memory, one process, one engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests import runs
from tests.runs import SMALL, Story

pytest.importorskip("peft")
NAMES = ("writer", "critic")
THREE = [
    *SMALL,
    *("loop.steps=3", "loop.groups=3", "loop.group_size=4", "loop.checkpoint_every=2", "loop.eval_splits=[]"),
    f"agent={Path(__file__).parents[1] / 'two_agents.py'}:with_partner",
    *("learner.lora.rank=4", "learner.optim.lr=0.002", "policies.writer.learner.lora.rank=8"),
    *("policies.critic.agents=['crit*']", "policies.critic.algorithm.name=rloo", "policies.partner.frozen=true"),
]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("three") / "run"
    runs.finish(runs.demo(folder, *THREE), timeout=900)
    return folder


@pytest.fixture(scope="module")
def told(three: Path) -> Story:
    return runs.story(three)


def weights(folder: Path, step: str) -> dict[str, str]:
    parts = {name: folder / "checkpoints" / step / name / "adapter_model.safetensors" for name in NAMES}
    return {name: hashlib.sha256(part.read_bytes()).hexdigest() for name, part in parts.items()}


def test_each_is_trained_in_the_same_process(three: Path, told: Story) -> None:
    logs = {path.name: (path / "learner.log").exists() for path in (three / "policies").iterdir()}
    assert logs == {"writer": True, "critic": False, "partner": False}  # the first of them has the process
    before, after = weights(three, "step-000002-1"), weights(three, "step-000003-1")
    assert len({*before.values(), *after.values()}) == 4
    assert {path.name for path in (three / "checkpoints/step-000003-1").iterdir()} == set(NAMES)
    for step in told.steps:
        for name in NAMES:
            turns = [turn for id in step.rollouts for turn in told.turns[id] if turn.policy == name]
            sampled = sum(len(turn.response_ids) for turn in turns)
            assert step.metrics[f"policies/{name}/training/rollout_logprobs_checked"] == sampled > 0
            assert step.metrics[f"policies/{name}/training/rollout_logprobs_diff_max"] < 1e-4
        assert not any(name.startswith("policies/partner/") for name in step.metrics)


def test_the_frozen_one_says_what_it_always_said(told: Story) -> None:
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert {(turn.agent, turn.policy) for turn in turns} == {(name, name) for name in (*NAMES, "partner")}
    found = {(turn.policy, version) for turn in turns for _, version in turn.versions}
    versions = {name: {version for policy, version in found if policy == name} for name, _ in found}
    assert versions == {"writer": {"1.0", "1.1", "1.2"}, "critic": {"1.0", "1.1", "1.2"}, "partner": {"1.0"}}


@pytest.mark.fault
def test_killed_it_goes_on_to_the_same_weights(three: Path, told: Story, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert runs.kill_when(runs.demo(folder, *THREE), runs.during_step(folder, 2, ended=2), limit=600)
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(resume, runs.during_step(folder, 3, ended=2), limit=600)
    runs.finish(resume, timeout=900)
    mine = runs.story(folder)
    assert mine.tokens() == told.tokens()
    assert [step.digest for step in mine.steps] == [step.digest for step in told.steps]
    assert None not in [step.digest for step in mine.steps]


@pytest.mark.slow
def test_the_commands_that_begin_with_what_it_left(three: Path, tmp_path: Path) -> None:
    told = json.loads(runs.finish(runs.strop("replay", three, "--step", "2", "--json")).stdout)
    assert told["same_weights"] is True
    options = ("--split", "test", "--folder", tmp_path / "eval", "--json")
    told = json.loads(runs.finish(runs.strop("eval", three, *options)).stdout)
    assert told["evaluations"][0]["turns"] > 0
    new = ("--folder", tmp_path / "new", "--json", "--set=loop.steps=1")
    runs.finish(runs.strop("train", "--from", three, *new))
    models = json.loads((tmp_path / "new" / "config.json").read_text())["policies"]
    assert {name: Path(models[name]["model"]).name for name in NAMES} == {name: name for name in NAMES}
    assert "model" not in models["partner"]
