"""A new algorithm is one file: in a copy of the package, and beside an agent as FILE.py:Class."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strop
from strop.cli import main
from strop.config import AlgorithmConfig, LearnerConfig, PolicyConfig
from strop.errors import ConfigError
from tests import runs
from tests.unit.algorithms.rollouts import batch_of, sample, turn

SOURCE = Path(strop.__file__).parent
MEDIAN = '''"""Advantages against the group's median."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from strop.algorithms.policy_gradient import PolicyGradient


class Median(PolicyGradient):
    """A rollout's advantage is its total minus the median of its group."""

    steepness: Annotated[float, Meta(gt=0, description="what the difference is multiplied by")] = 1.0

    def compute_advantages(self, batch, rewards):
        totals = rewards.outcomes(batch)
        medians = {int(g): np.median(totals[batch.counted & (batch.group == g)]) for g in set(batch.group)}
        advantage = self.steepness * (totals - np.array([medians[int(g)] for g in batch.group]))
        batch.entries.advantage[:] = np.nan_to_num(advantage)[batch.entries.rollout]
        return [None] * len(batch.turns), {"algorithm/steepness": self.steepness}

    def compute_loss(self, logp, entropy, value, entries):
        loss, metrics = super().compute_loss(logp, entropy, value, entries)
        return loss, metrics | {"algorithm/advantage": entries.advantage.abs()}
'''
AGENT = '''"""Its reward differs from answer to answer."""


def agent(task, llm):
    messages = [{"role": "user", "content": task.data["question"]}]
    answer = llm.client().chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    return float(sum(map(ord, answer.choices[0].message.content or "")) % 97)
'''
SMALL = [
    *("loop.groups=2", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4", "policy.train.max_tokens=8"),
    *("loop.checkpoint_every=1", "engine.max_sequences=8", "policy.context=192", "engine.threads=1"),
]


def train(*arguments: str | Path, settings: list[str]) -> list[str]:
    return runs.strop("train", *arguments, "--json", *(f"--set={setting}" for setting in settings))


def begin(folder: Path, settings: list[str]) -> list[str]:
    """A run of one step, with an agent in a file beside its folder."""
    (folder / "agent.py").write_text(AGENT)
    given = [*SMALL, "loop.steps=1", *settings]
    return train("agent.py:agent", "--tasks", "strop.demo:tasks", "--folder", "run", settings=given)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def learned(folder: Path, steps: int, steepness: float) -> None:
    """Credit ran in the loop and the loss in the learner's process, in every step."""
    lines = [line for line in runs.metrics(folder) if "actor/pg_loss" in line]
    assert len(lines) == steps
    assert all(line["algorithm/steepness"] == steepness for line in lines)
    assert any(line["algorithm/advantage"] > 0 for line in lines)


def test_one_new_file_in_the_package_is_an_algorithm(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "strop"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = digests(copy)
    (copy / "algorithms" / "median.py").write_text(MEDIAN)
    after = digests(copy)
    assert [name for name in {*before, *after} if before.get(name) != after.get(name)] == ["algorithms/median.py"]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "STROP_COPY": str(copy)}

    def run(command: list[str]) -> str:
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "algorithm.settings.steepness = 1.0  # what the difference" in run(runs.strop("config", "median"))
    code = (
        "import os, inspect, strop; assert strop.__file__.startswith(os.environ['STROP_COPY']);"
        "assert 'steepness' in inspect.signature(strop.Median).parameters;"
        "print(strop.Median(steepness=2).given)"
    )
    assert run([sys.executable, "-c", code]) == "{'steepness': 2.0}\n"
    run(begin(tmp_path, ["algorithm.name=median", "algorithm.settings.steepness=2"]))
    learned(tmp_path / "run", steps=1, steepness=2.0)


def test_a_file_of_ones_own_is_an_algorithm_and_resumes(tmp_path: Path) -> None:
    """Named from the folder it is in; resumed and replayed from another one."""
    (tmp_path / "median.py").write_text(MEDIAN)
    runs.finish(begin(tmp_path, ["algorithm.name=median.py:Median", "algorithm.settings.steepness=3"]), cwd=tmp_path)
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["algorithm"]
    assert (kept["name"], kept["settings"]) == (f"{tmp_path / 'median.py'}:Median", {"steepness": 3})
    (other := tmp_path / "other").mkdir()
    runs.finish(train("--resume", tmp_path / "run", settings=["loop.steps=2"]), cwd=other)
    learned(tmp_path / "run", steps=2, steepness=3.0)
    runs.finish(runs.strop("replay", tmp_path / "run", "--step", "2"), cwd=other)


def test_a_class_given_in_python(tmp_path: Path) -> None:
    """Its name and what it was given are kept; what was not given stays with the settings it had by default."""
    (tmp_path / "median.py").write_text(MEDIAN)
    made = strop.algorithms.find(f"{tmp_path / 'median.py'}:Median")(steepness=2, rewards={"a": 1})
    assert chosen(made, tmp_path) == {
        "name": f"{tmp_path / 'median.py'}:Median",
        "rewards": {"a": 1.0},
        "settings": {"steepness": 2.0},
    }
    assert chosen(strop.GRPO, tmp_path) == {"name": "grpo", "settings": {}}
    assert chosen(strop.DrGRPO(clip=1), tmp_path) == {"name": "dr_grpo", "settings": {"clip": 1.0}}


def test_a_class_without_a_file_is_written_into_the_folder(tmp_path: Path) -> None:
    class Still(strop.GRPO):
        rate: float = 0.5

    name = chosen(Still(rate=0.25), tmp_path)["name"]
    config = AlgorithmConfig(name=name, settings={"rate": 0.25})
    made = strop.algorithms.make(config, LearnerConfig(minibatches=2), PolicyConfig())
    assert (made.rate, made.needs) == (0.25, {"proximal"})


def chosen(algorithm: object, folder: Path) -> dict[str, object]:
    from strop.run import api

    return api._chosen(algorithm, folder)


def test_the_class_of_the_training_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "training.md").read_text()
    code = guide.partition("### An algorithm of your own")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "guide_median.py").write_text(code)
    config = AlgorithmConfig(name=f"{tmp_path / 'guide_median.py'}:Median", settings={"steepness": 2.0})
    made = strop.algorithms.make(config, LearnerConfig(), PolicyConfig())
    batch = batch_of(sample(0, 0.0, turn()), sample(1, 1.0, turn()), sample(2, 5.0, turn()))
    assert made.assign_credit(batch)["algorithm/steepness"] == 2.0
    assert sorted(set(batch.entries.advantage.tolist())) == [-2.0, 0.0, 8.0]


def test_settings_of_a_file_of_ones_own_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "median.py").write_text(MEDIAN)
    assert main(["config", f"{tmp_path / 'median.py'}:Median"]) == 0
    assert "algorithm.settings.steepness = 1.0  # what the difference is multiplied by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grop", "is not an algorithm. Fix: write grpo"),
        ("{}:Medain", ":Median"),
        ("{}:np", "is not an algorithm. Fix: make it a subclass"),
        ("{}:PolicyGradient", "is not whole. Fix: give it compute_advantages"),
        ("gone.py:Median", "there is no file"),
        ("strop.nothing:Median", "there is no module"),
    ],
)
def test_what_is_not_an_algorithm_is_refused_in_a_sentence(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "median.py").write_text(MEDIAN)
    with pytest.raises(ConfigError) as refused:
        strop.algorithms.make(AlgorithmConfig(name=name.format(tmp_path / "median.py")), LearnerConfig())
    assert said in str(refused.value)


def test_settings_of_a_class_are_checked(tmp_path: Path) -> None:
    (tmp_path / "median.py").write_text(MEDIAN)
    place = f"{tmp_path / 'median.py'}:Median"
    for settings, said in (
        ({"steepnes": 1.0}, r"Fix: write algorithm\.settings\.steepness"),
        ({"steepness": -1.0}, r"algorithm\.settings\.steepness does not fit"),
        ({"rewards": {}}, r"Fix: write algorithm\.rewards"),
    ):
        with pytest.raises(ConfigError, match=said):
            strop.algorithms.make(AlgorithmConfig(name=place, settings=settings), LearnerConfig())
