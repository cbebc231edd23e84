"""The recipe to copy: three real steps as it is, and the same under another name."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from strop import config
from tests import runs
from tests.recipes.trained import ROOT, train

agent, data = (importlib.import_module(f"recipes.template.{name}") for name in ("agent", "data"))
SHORT = ("loop.steps=3", "loop.groups=4", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4")


@pytest.mark.parametrize("size", ["laptop", "smollm2"])
def test_configs_are_whole(size: str) -> None:
    found = config.load(toml=ROOT / "recipes" / "template" / f"{size}.toml")
    assert (ROOT / found.agent.partition(":")[0]).is_file()
    assert found.tasks == "recipes/template/data.py:tasks"


def test_it_is_short_enough_to_copy() -> None:
    assert len((ROOT / "recipes/template/agent.py").read_text().splitlines()) <= 30


def test_tasks_and_their_examples() -> None:
    task, held_out = data.tasks()[1], data.tasks()[0]
    assert (task.split, held_out.split) == ("train", "test")
    *before, asked = data.tasks(examples=True)[1].data["messages"]
    assert [message["role"] for message in before] == ["user", "assistant", "tool", "assistant"] * 3
    assert [asked] == task.data["messages"]
    asked = json.loads(before[1]["tool_calls"][0]["function"]["arguments"])
    assert agent.calculator(**asked) == before[2]["content"] == "42"


def test_three_steps(tmp_path: Path) -> None:
    trained = train("template", tmp_path, *SHORT)
    assert len(trained.rollouts) == 48
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    assert set(trained.check()) == {None}
    called = [rollout for rollout in trained.rollouts if rollout.reward("call")]
    assert called, "the model never used its tool"
    assert any(rollout.reward() for rollout in called)


@pytest.mark.slow
def test_a_copy_trains_under_its_own_name(tmp_path: Path) -> None:
    """As its README says."""
    shutil.copytree(ROOT / "recipes" / "template", tmp_path / "recipes" / "mine")
    toml = tmp_path / "recipes" / "mine" / "laptop.toml"
    toml.write_text(toml.read_text().replace("template", "mine"))
    sets = [f"--set={one}" for one in (*SHORT, "loop.steps=1")]
    runs.finish(runs.strop("train", "--config", toml, "--folder", tmp_path / "run", *sets), cwd=tmp_path)
    assert (tmp_path / "run" / "summary.json").is_file()
