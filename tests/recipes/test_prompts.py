"""The room-booking recipe: its rooms against the tasks' own answers, and its prompts improved."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop import config
from tests import runs
from tests.recipes.trained import ROOT

HERE = ROOT / "recipes" / "prompts"
DATA = ROOT.parent / "shared" / "data" / "agent_lightning" / "apo_room_tasks.jsonl"


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its files import each other as they do in a run."""
    monkeypatch.syspath_prepend(str(HERE))
    yield
    for name in ("rooms", "data", "agent", "scripted"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("size", ["laptop", "gpu"])
def test_configs_are_whole(size: str) -> None:
    found = config.load(toml=HERE / f"{size}.toml")
    assert set(found.prompts) == {"system", "request"}
    assert "date" in found.prompts["request"].list_placeholders()
    assert found.algorithm.settings["optimizer"] in found.gateway.outside


@pytest.mark.skipif(not DATA.exists(), reason="the room tasks are not there")
def test_the_right_choice_of_every_task() -> None:
    """Worked out from the rooms, it is what the data expects."""
    data, rooms = importlib.import_module("data"), importlib.import_module("rooms")
    tasks = data.tasks(str(DATA))
    assert len(tasks) == 57
    for task in tasks:
        wanted = task.data["wanted"]
        there = rooms.list_rooms(wanted["date"], wanted["time"], wanted["duration_min"])
        assert rooms.choose(wanted, there) == task.data["expected"], task.id


def test_tasks_of_its_own() -> None:
    tasks = importlib.import_module("data").tasks()
    assert {task.split for task in tasks} == {"train", "validation", "test"}
    assert len({task.data["expected"] for task in tasks}) > 4  # no constant answer is right


def test_what_the_agent_reads() -> None:
    agent = importlib.import_module("agent")
    assert agent.read_choice("final_choice: **No Room**\nreason: none is free") == "No Room"
    assert agent.read_choice("I would take Nova.") == ""
    assert agent.run_tool('{"date": 1}').startswith("error: ")
    assert len(json.loads(agent.run_tool('{"date": "2025-10-13", "time": "09:00", "duration_min": 30}'))) == 7


def test_its_prompts_are_improved(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, str(HERE / "scripted.py")], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = f"{server.stdout.readline().strip()}/v1"
        sets = [f"--set=gateway.outside.{name}.url={url}" for name in ("booker", "writer")]
        given = ("--config", HERE / "laptop.toml", "--folder", tmp_path / "run", "--json", *sets)
        told = json.loads(runs.finish(runs.strop("train", *given), cwd=ROOT).stdout)
    finally:
        server.kill()
        server.communicate()
    assert told["start"] < 0.5
    assert told["end"] > 0.8
    story = runs.story(tmp_path / "run")
    assert {len(story.turns[rollout.id]) for rollout in story.rollouts} == {2}, "the tool is called, then a room chosen"
