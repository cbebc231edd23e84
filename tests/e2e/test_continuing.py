"""A second run beside the first, in its place, from its weights; the first one resumed with other settings."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

import strop
from strop.errors import ConfigError
from tests import runs

SMALL = [*runs.SMALL, "loop.steps=2", "loop.groups=2", "loop.eval_every=0", "loop.eval_greedy=false"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continuing") / "demo"
    runs.finish(runs.demo(folder, *SMALL))
    return folder


def fingerprint(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def said(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(runs.strop(*arguments), capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_a_second_run_is_numbered_anew_and_then_overwritten(first: Path) -> None:
    before, second = fingerprint(first), first.with_name("demo-2")
    done = runs.finish(runs.demo(first, *SMALL, "loop.steps=0"))
    assert f"{first} holds a run: this one is kept in {second}" in done.stderr
    assert json.loads(done.stdout)["folder"] == str(second)
    assert fingerprint(first) == before
    (second / "notes.md").write_text("mine")
    runs.finish([*runs.demo(second, *SMALL, "loop.steps=0", seed=1), "--overwrite"])
    assert not first.with_name("demo-2-2").exists()
    assert (json.loads((second / "config.json").read_text())["seed"], (second / "notes.md").read_text()) == (1, "mine")


def test_a_new_run_begins_with_another_ones_weights(first: Path, tmp_path: Path) -> None:
    """With its agent, its tasks and its settings, too, but for what is given."""
    new = ["train", "--from", f"{first}:2", "--folder", tmp_path / "new", "--json"]
    runs.finish(runs.strop(*new, "--set", "loop.steps=1", "--set", "algorithm.settings.clip=0.1"))
    last = first / "checkpoints" / "step-000002-1"
    assert weights(tmp_path / "new" / "start") == weights(last)
    assert json.loads((tmp_path / "new" / "start.json").read_text())["checkpoint"] == str(last)
    told, old = runs.story(tmp_path / "new"), json.loads((first / "config.json").read_text())
    made = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (made["agent"], made["tasks"], made["loop"]["groups"]) == (old["agent"], old["tasks"], 2)
    assert (made["algorithm"]["settings"], [step.number for step in told.steps]) == ({"clip": 0.1}, [1])
    assert weights(tmp_path / "new" / "checkpoints" / "step-000001-1") != weights(last)
    evaluated = [r.id for r in told.rollouts if r.mode == "eval"]
    drawn = [[turn.logprobs for turn in runs.story(f).turns[evaluated[0]]] for f in (tmp_path / "new", first)]
    assert drawn[0] != drawn[1]  # the first evaluation is of those weights, not of the model in the box


def test_resumed_with_more_steps_and_another_rate(first: Path) -> None:
    """What was changed holds for the next resume as well."""
    refused = said("train", "--resume", first, "--set", "loop.groups=3")
    assert (refused.returncode, "keeps its loop.groups" in refused.stderr) == (2, True)
    changes = ["loop.steps=3", "learner.optim.lr=1e-5", "learner.optim.warmup=0", "loop.eval_samples=2"]
    runs.finish(runs.strop("train", "--resume", first, "--json", *(f"--set={change}" for change in changes)))
    summary = strop.resume(first, loop={"steps": 4}, quiet=True)
    assert (summary.steps, summary.done, summary.folder) == (4, True, str(first))
    rates = [step.metrics["actor/lr"] for step in runs.story(first).steps]
    assert rates[0] == pytest.approx(1e-4)  # the demo's own: 3e-4, in the first of three steps of warm-up
    assert rates[2] == pytest.approx(1e-5 * (1 - 2 / 28))
    assert rates[3] == pytest.approx(1e-5 * (1 - 3 / 28))
    lines = [json.loads(line) for line in (first / "changes.jsonl").read_text().splitlines()]
    assert [line["after_step"] for line in lines] == [2, 3]
    assert lines[1]["changed"] == {"loop.steps": [3, 4]}
    with pytest.raises(ConfigError, match=r"keeps its loop\.group_size"):
        strop.resume(first, loop={"group_size": 2}, quiet=True)


def test_a_checkpoint_becomes_a_plain_folder(first: Path, tmp_path: Path) -> None:
    made = strop.export(f"{first}:2", tmp_path / "model")
    assert (made.name, weights(tmp_path / "model")) == ("step-000002-1", weights(made))
    assert not (tmp_path / "model" / "optimizer.pt").exists()
    done = said("export", first, tmp_path / "model")
    assert (done.returncode, "choose another place" in done.stderr) == (2, True)
