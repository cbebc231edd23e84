"""Whole runs with a teacher, from the command line: without any reward, killed, replayed, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.models.names import resolve
from tests import runs
from tests.runs import SMALL

HINT = 'algorithm.settings.teacher_prompt="Use the calculator."'


def settings(*more: str) -> list[str]:
    agent = Path(__file__).parents[1] / "unrewarded.py"
    return [*SMALL, "algorithm.name=distill", f"agent={agent}:agent", *more]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the student's family with other weights."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    shutil.copytree(resolve("strop/nano"), folder, ignore=shutil.ignore_patterns("SHA256SUMS*", "sums*"))
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    noisy = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def taught(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    runs.finish(runs.demo(folder, *settings(f"algorithm.settings.teacher={teacher}")), timeout=900)
    return folder


def test_nothing_is_dropped_for_want_of_a_reward(taught: Path) -> None:
    told = runs.story(taught)
    assert [step.number for step in told.steps] == [1, 2, 3, 4]
    for step in told.steps:
        assert not step.dropped
        assert step.metrics["actor/skipped"] == 0
        assert step.metrics["distill/kl/mean"] > 0
        assert step.metrics["critic/advantages/mean"] == pytest.approx(-step.metrics["distill/kl/mean"])
        assert "critic/rewards/mean" not in step.metrics
        assert "timing_s/teacher" in step.metrics
    assert len({step.digest for step in told.steps}) == 4
    assert json.loads((taught / "summary.json").read_text())["done"]


def test_the_teacher_answers_nobody_and_has_no_checkpoint(taught: Path, teacher: Path) -> None:
    turns = [turn for turns in runs.story(taught).turns.values() for turn in turns]
    assert {(turn.agent, turn.policy) for turn in turns} == {("main", "main")}
    config = json.loads((taught / "config.json").read_text())
    assert config["policies"]["teacher"] == {"model": str(teacher), "frozen": True, "agents": []}
    assert (taught / "checkpoints" / "step-000004-1" / "model.safetensors").is_file()


@pytest.mark.fault
@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_weights(taught: Path, teacher: Path, tmp_path: Path) -> None:
    """With a checkpoint of step 2: step 3 is replayed, so that the teacher is asked once more of what is recorded."""
    folder = tmp_path / "run"
    command = runs.demo(folder, *settings(f"algorithm.settings.teacher={teacher}"))
    assert runs.kill_when(command, runs.during_step(folder, 4, ended=2))
    runs.finish(runs.strop("train", "--resume", folder, "--json"), timeout=600)
    runs.same(taught, folder)
    assert runs.metrics(taught) == runs.metrics(folder)


@pytest.mark.fault
@pytest.mark.slow
def test_killed_it_goes_on_being_taught_by_itself(tmp_path: Path) -> None:
    """Its own weights of that moment, and a prompt that only the teacher sees; with an adapter, too."""
    given = settings("algorithm.settings.teacher=self", HINT, "learner.lora.rank=2", "loop.eval_splits=[]")
    whole, folder = tmp_path / "whole", tmp_path / "run"
    runs.finish(runs.demo(whole, *given))
    assert runs.kill_when(runs.demo(folder, *given), runs.during_step(folder, 4, ended=2))
    runs.finish(runs.strop("train", "--resume", folder, "--json"), timeout=600)
    mine, theirs = runs.story(whole), runs.story(folder)
    assert mine.tokens() == theirs.tokens()
    assert [step.digest for step in mine.steps] == [step.digest for step in theirs.steps]
    assert mine.steps[0].metrics["distill/kl/mean"] != 0


@pytest.mark.slow
def test_a_step_can_be_replayed(taught: Path) -> None:
    told = json.loads(runs.finish(runs.strop("replay", taught, "--step", "4", "--json")).stdout)
    assert told["same_weights"]
    assert told["differ"] == {}
    assert "distill/kl/mean" in told["replay"]["metrics"]


@pytest.mark.slow
def test_the_other_commands_take_such_a_run(taught: Path, tmp_path: Path) -> None:
    assert "distill" in runs.finish(runs.strop("runs", taught)).stdout
    assert "succeeded" in runs.finish(runs.strop("rollouts", taught)).stdout
    runs.finish(runs.strop("export", taught, tmp_path / "model"))
    options = ("--split", "test", "--compare", "start", "--set=agent=strop.demo:agent", "--folder", tmp_path / "eval")
    told = json.loads(runs.finish(runs.strop("eval", taught, *options, "--json")).stdout)
    assert [Path(one["weights"]).name for one in told["evaluations"]] == ["step-000004-1", ""]
    assert not (tmp_path / "eval" / "1-trained" / "policies" / "teacher").exists(), "nobody asks the teacher"


@pytest.mark.slow
def test_rollouts_may_go_on_meanwhile(teacher: Path, tmp_path: Path) -> None:
    given = settings(f"algorithm.settings.teacher={teacher}", "loop.staleness=1", "engine.deterministic=false")
    runs.finish(runs.demo(tmp_path / "run", *given, "loop.eval_splits=[]"))
    steps = runs.story(tmp_path / "run").steps
    assert all(step.metrics["distill/kl/mean"] > 0 for step in steps)
    assert steps[-1].metrics["training/off_policy/staleness/max"] == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one token more."""
    folder = tmp_path_factory.mktemp("models") / "stranger"
    shutil.copytree(resolve("strop/nano"), folder)
    about = json.loads((folder / "tokenizer.json").read_text())
    last = max(token["id"] for token in about["added_tokens"])
    about["added_tokens"].append(about["added_tokens"][-1] | {"id": 5000 + last, "content": "<|think|>"})
    (folder / "tokenizer.json").write_text(json.dumps(about))
    return folder


def refuse(folder: Path, *given: str) -> str:
    done = subprocess.run(runs.demo(folder, *given), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Fix: " in done.stderr
    assert not folder.exists()
    return done.stderr


def test_a_teacher_that_cannot_be_one_is_refused_in_a_sentence(stranger: Path, tmp_path: Path) -> None:
    taught = [*SMALL, "algorithm.name=distill"]
    said = refuse(tmp_path / "a", *taught, f"algorithm.settings.teacher={stranger}")
    assert "the teacher (policies.teacher) has another tokenizer than the student: token '<|think|>' is missing" in said
    said = refuse(tmp_path / "b", *taught, "algorithm.settings.teacher=techer")
    assert "'techer', which is neither a policy of this run (main) nor a model" in said
    said = refuse(tmp_path / "c", *taught, "algorithm.settings.teacher=self")
    assert "the KL is 0 everywhere" in said
    vllm = (
        "policies.big.engine.name=vllm",
        "policies.big.frozen=true",
        "policies.big.agents=[]",
        "policies.main.agents=['main']",
    )
    warm = ("engine.deterministic=false", "policy.train.temperature=0.7", "algorithm.settings.teacher=big")
    assert "vLLM gives logprobs of given tokens at temperature 1 only" in refuse(tmp_path / "d", *taught, *vllm, *warm)
