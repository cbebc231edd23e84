"""Runs that improve prompts, killed -9 at five moments: no budget is exceeded, and the versions are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import prompt_runs, runs
from tests.prompt_runs import Models, configure, is_asking, train

pytestmark = pytest.mark.fault

APO = {"beam_width": 2, "branch_factor": 2}


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with prompt_runs.open_models() as models:
        models.control(delay=0.05)  # so that calls can be caught under way
        yield models


def count_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def list_moments(folder: Path) -> list[Callable[[], bool]]:
    """While the first version is tried, while a call is under way, between steps, in a later call, late in the run."""
    return [
        runs.during_step(folder, 1, ended=5),
        lambda: is_asking(folder, 0),
        lambda: count_lines(folder / "metrics.jsonl") > 4,
        lambda: is_asking(folder, 9),
        lambda: count_lines(folder / "metrics.jsonl") > 9,
    ]


def kill_five_times(toml: Path, folder: Path) -> int:
    """Begin a run, kill it at every moment, and let it end; returns how often it was killed."""
    command, killed = runs.strop("train", "--config", toml, "--json"), 0
    for moment in list_moments(folder):
        killed += runs.kill_when(command, moment)
        command = runs.strop("train", "--resume", folder, "--json")
    runs.finish(command)
    return killed


def read_versions(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "prompts.json").read_text())["versions"]


@pytest.mark.parametrize("name", ["gepa", "apo"])
def test_the_versions_are_the_same(models: Models, tmp_path: Path, name: str) -> None:
    """Where the budget does not bind. Calls that were lost stay spent, and were asked again."""
    more = APO if name == "apo" else {}
    settings = {"max_calls": 0, "max_rollouts": 0, **more}
    train(configure(models, tmp_path / "whole", name, **settings), "--set=loop.steps=14")
    before = models.counts["writer"]
    toml = configure(models, tmp_path / "killed", name, **settings)
    toml.write_text(toml.read_text().replace("steps = 400", "steps = 14"))
    assert kill_five_times(toml, tmp_path / "killed") == 5
    assert read_versions(tmp_path / "killed") == read_versions(tmp_path / "whole")
    assert len(read_versions(tmp_path / "whole")) > 2
    whole, killed = runs.story(tmp_path / "whole"), runs.story(tmp_path / "killed")
    assert [step.digest for step in killed.steps] == [step.digest for step in whole.steps]
    assert [step.rollouts for step in killed.steps] == [step.rollouts for step in whole.steps]
    reserved = [one for one in prompt_runs.calls(tmp_path / "killed") if "key" in one]
    assert len({one["call"] for one in reserved}) == len(
        {one["call"] for one in prompt_runs.calls(tmp_path / "whole") if "key" in one}
    )
    assert models.counts["writer"] - before <= len(reserved)
    assert any(one["attempt"] > 1 for one in reserved), "no call was lost"


@pytest.mark.parametrize("name", ["gepa", "apo"])
def test_no_budget_is_exceeded(models: Models, tmp_path: Path, name: str) -> None:
    """Where it binds: what the provider saw is within it, kills or not."""
    before, more = models.counts["writer"], APO if name == "apo" else {}
    toml = configure(models, tmp_path / "run", name, max_calls=25, max_rollouts=400, **more)
    assert kill_five_times(toml, tmp_path / "run") >= 3
    assert 15 <= models.counts["writer"] - before <= 25
    reserved = [one for one in prompt_runs.calls(tmp_path / "run") if "key" in one]
    assert len(reserved) <= 25
    rollouts = [one for one in runs.story(tmp_path / "run").rollouts if one.mode == "train"]
    assert len(rollouts) <= 400
