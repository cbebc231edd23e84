"""Past versions as opponents: who answers, with which weights, and the same again after kill -9."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strop.models.names import resolve
from strop.types import Turn
from tests import runs
from tests.runs import SMALL, Story

peft = pytest.importorskip("peft")
POOL = [
    *SMALL,
    *("loop.steps=4", "loop.groups=4", "loop.group_size=3", "loop.checkpoint_every=1", "loop.eval_splits=[]"),
    *("loop.keep_checkpoints=9", f"agent={Path(__file__).parents[1] / 'two_agents.py'}:agent"),
    *("learner.lora.rank=4", "learner.optim.lr=0.002", "policies.writer.agents=['writer']"),
    "policies.critic.past={of = 'writer', size = 2}",
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("past") / "run"
    runs.finish(runs.demo(folder, *POOL), timeout=900)
    return folder


@pytest.fixture(scope="module")
def told(played: Path) -> Story:
    return runs.story(played)


def by_group(told: Story) -> dict[str, set[str]]:
    """The versions that answered as the critic, by group."""
    found: dict[str, set[str]] = {}
    for rollout in told.rollouts:
        for turn in told.turns[rollout.id]:
            if turn.policy == "critic":
                found.setdefault(rollout.group, set()).update(name for _, name in turn.versions)
    return found


def test_a_group_meets_one_of_the_newest_versions(told: Story) -> None:
    met = by_group(told)
    assert all(len(versions) == 1 for versions in met.values())
    allowed = [{"1.0"}, {"1.0", "1.1"}, {"1.1", "1.2"}, {"1.2", "1.3"}]
    for step, pool in zip(told.steps, allowed, strict=True):
        seen = set().union(*(met[id.partition(".")[0]] for id in step.rollouts))
        assert seen <= pool
        past = {name: n for name, n in step.metrics.items() if name.startswith("past/critic/")}
        counted = {name.split("/")[2]: n for name, n in past.items() if name.endswith("/rollouts")}
        assert counted.keys() == seen
        assert sum(counted.values()) == len(step.rollouts)
    assert len(set().union(*met.values())) > 2


def test_each_answers_with_the_weights_of_its_checkpoint(played: Path, told: Story) -> None:
    """By PEFT, and nothing of ours: every token is as likely as was recorded."""
    for name in ("1.1", "1.2"):
        model = adapted(played / "checkpoints" / f"step-{int(name[2:]):06d}-1")
        turns = [turn for turns in told.turns.values() for turn in turns if is_of(turn, name)]
        assert turns
        assert max(distance(model, turn) for turn in turns) < 1e-4
        other = adapted(played / "checkpoints" / "step-000004-1")
        assert max(distance(other, turn) for turn in turns) > 1e-3


def is_of(turn: Turn, version: str) -> bool:
    return turn.policy == "critic" and turn.versions == [(0, version)]


def whole_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapted(checkpoint: Path) -> Any:
    said = json.loads((checkpoint / "adapter_config.json").read_text())
    model = whole_model(resolve("strop/nano"))
    config = peft.LoraConfig(r=said["r"], lora_alpha=said["lora_alpha"], target_modules=said["target_modules"])
    model = peft.get_peft_model(model, config).eval()
    peft.set_peft_model_state_dict(model, load_file(checkpoint / "adapter_model.safetensors"))
    return model


@torch.no_grad()
def distance(model: Any, turn: Turn) -> float:
    ids = torch.tensor([turn.ids])
    logits = model(input_ids=ids).logits[0, len(turn.prompt_ids) - 1 : -1].float() / turn.sampling.temperature
    found = logits.log_softmax(-1).gather(1, ids[0, len(turn.prompt_ids) :, None])[:, 0]
    return float((found - torch.tensor(turn.logprobs)).abs().max())


def test_only_the_other_one_is_trained(told: Story) -> None:
    for step in told.steps:
        assert step.metrics["agents/critic/loss_tokens"] == 0
        assert step.metrics["agents/writer/loss_tokens"] > 0


@pytest.mark.fault
def test_killed_it_meets_the_same_opponents(played: Path, told: Story, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert runs.kill_when(runs.demo(folder, *POOL), runs.during_step(folder, 3, ended=2), limit=600)
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(resume, runs.during_step(folder, 4, ended=2), limit=600)
    runs.finish(resume, timeout=900)
    mine = runs.story(folder)
    assert mine.tokens() == told.tokens()
    assert [step.digest for step in mine.steps] == [step.digest for step in told.steps]


@pytest.mark.slow
def test_the_checkpoints_of_an_earlier_run(played: Path, tmp_path: Path) -> None:
    """A pool that stays as it is, also where all weights of a policy are trained; and evaluations meet the model."""
    earlier = [one for one in POOL if not one.startswith(("policies.critic.past", "learner.lora"))]
    given = [f"policies.critic.past={{of = '{played}', size = 3, sample = 'uniform'}}", "loop.steps=2"]
    folder = tmp_path / "run"
    runs.finish(runs.demo(folder, *earlier, *given, "loop.eval_splits=['test']", "loop.eval_greedy=false"), timeout=900)
    told = runs.story(folder)
    trained = {rollout.group for rollout in told.rollouts if rollout.mode == "train"}
    met = by_group(told)
    assert set().union(*(met[group] for group in trained)) <= {"1.2", "1.3", "1.4"}
    assert set().union(*(versions for group, versions in met.items() if group not in trained)) == {"1.0"}


@pytest.mark.slow
def test_the_commands_that_begin_with_what_it_left(played: Path, tmp_path: Path) -> None:
    """In an evaluation the opponent is the model itself; a new run begins with the new model for both."""
    options = ("--split", "test", "--compare", "start", "--folder", tmp_path / "eval", "--json")
    told = json.loads(runs.finish(runs.strop("eval", played, *options)).stdout)
    assert all(one["turns"] > 0 for one in told["evaluations"])
    runs.finish(runs.strop("train", "--from", played, "--folder", tmp_path / "new", "--json", "--set=loop.steps=2"))
    assert runs.story(tmp_path / "new").steps[-1].number == 2
    told = json.loads(runs.finish(runs.strop("replay", played, "--step", "2", "--json")).stdout)
    assert told["same_weights"] is True
    done = subprocess.run(
        runs.strop("export", played, tmp_path / "out", "--policy", "critic"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "policies.critic is not trained" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_versions_that_are_whole_models(tmp_path: Path) -> None:
    whole = [one for one in POOL if not one.startswith("learner.lora")]
    folder = tmp_path / "run"
    runs.finish(runs.demo(folder, *whole, "loop.steps=3", "learner.optim.lr=0.0003"), timeout=900)
    told = runs.story(folder)
    assert set().union(*by_group(told).values()) > {"1.0"}
    for name in ("1.1", "1.2"):
        turns = [turn for turns in told.turns.values() for turn in turns if is_of(turn, name)]
        model = whole_model(folder / "checkpoints" / f"step-{int(name[2:]):06d}-1")
        assert max((distance(model, turn) for turn in turns), default=0.0) < 1e-4
        other = whole_model(folder / "checkpoints" / "step-000003-1")
        assert max((distance(other, turn) for turn in turns), default=1.0) > 1e-3


def test_a_pool_that_is_empty_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for of, says in {
        str(tmp_path / "empty"): "a run without a checkpoint, so that the pool is empty. Fix: ",
        str(tmp_path / "nobody"): "neither a policy nor the folder of a run. Fix: ",
    }.items():
        folder = tmp_path / "run"
        command = runs.demo(folder, *POOL[:-1], f"policies.critic.past={{of = '{of}'}}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert says in done.stderr.replace("\n", " ")
        assert not (folder / "store.sqlite").exists()
