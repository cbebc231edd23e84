"""The recipe that joins three ways: its parts, and the whole of it, made small."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop import config, demo
from tests import runs
from tests.recipes.trained import ROOT

HERE = ROOT / "recipes" / "joined"


def test_its_config_is_whole() -> None:
    found = config.load(toml=HERE / "laptop.toml")
    assert found.prompts["request"].list_placeholders() == ("symbols",)
    scripted = importlib.import_module("recipes.joined.scripted")
    assert all("{symbols}" in phrasing for phrasing in scripted.PHRASINGS)


def test_tasks_share_no_operands_with_those_held_out() -> None:
    tasks = importlib.import_module("recipes.joined.data").tasks()
    for task in tasks:
        a, _, b = task.data["symbols"].split()
        assert demo.held_out(int(a), int(b)) == (task.split == "test")
        assert demo.calculator(task.data["calls"][0]) == str(task.data["answer"])


def test_it_refuses_a_folder_that_is_there(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "train.py"), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Fix: choose another --folder" in done.stderr


@pytest.mark.slow
def test_every_stage_begins_where_the_one_before_ended(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "train.py"), "--config", str(HERE / "laptop.toml"), "--json"]
    done = runs.finish([*command, "--folder", str(tmp_path / "run"), "--rl-steps", "2"], timeout=900, cwd=ROOT)
    table = json.loads(done.stdout)
    assert [row["stage"] for row in table] == ["the model as it is", "sft", "rl", "prompts"]
    assert table[1]["reward"] > table[0]["reward"] + 0.3, "imitation brings most of it"
    summaries = {
        stage: json.loads((tmp_path / "run" / stage / "summary.json").read_text()) for stage in ("sft", "rl", "prompts")
    }
    assert summaries["rl"]["start"] == pytest.approx(summaries["sft"]["end"], abs=0.1)
    assert summaries["prompts"]["start"] == pytest.approx(summaries["rl"]["end"], abs=0.1)
