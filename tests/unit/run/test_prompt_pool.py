"""Versions of prompts: which is best, who wins which task, what changed, and what lies on disk."""

from pathlib import Path

import pytest

from strop.config import load
from strop.errors import DamagedCheckpoint, PlaceError
from strop.run.prompts.pool import (
    PromptCheckpoint,
    PromptPool,
    PromptVersion,
    list_differences,
    read_pool,
    read_prompts,
    replace_prompts,
    write_pool,
    write_prompts,
)


def make_pool(*scores: dict[str, float]) -> PromptPool:
    pool = PromptPool()
    for number, one in enumerate(scores):
        prompts = {"system": f"text {number}"}
        pool.add(
            PromptVersion(number=number, step=number, parents=[number - 1] * bool(number), prompts=prompts, scores=one)
        )
    return pool


def test_the_best_has_the_highest_mean_and_of_equal_ones_is_the_first() -> None:
    pool = make_pool({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0})
    assert pool.best.number == 1


def test_who_wins_which_task() -> None:
    pool = make_pool({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0})
    assert pool.find_winners() == {"a": [0, 1], "b": [2]}
    assert pool.find_front() == [0, 1, 2]


def test_a_pool_on_disk(tmp_path: Path) -> None:
    pool = make_pool({"a": 1.0})
    assert read_pool(tmp_path) is None
    write_pool(tmp_path, pool)
    assert read_pool(tmp_path) == pool
    (tmp_path / "prompts.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match="Fix: resume"):
        read_pool(tmp_path)


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "step-000001-1"
    write_prompts(place, PromptCheckpoint(version="1.1", prompts={"system": "é"}))
    write_prompts(place, PromptCheckpoint(version="1.1", prompts={"system": "anew"}))  # of a step that never was
    assert read_prompts(place) == {"system": "anew"}
    assert (place / "system.md").read_text() == "anew"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001-1"]
    assert read_prompts(tmp_path) is None
    (place / "prompts.json").write_text("[]")
    with pytest.raises(DamagedCheckpoint):
        read_prompts(place)


def test_prompts_in_a_configuration() -> None:
    config = load(prompts={"system": {"text": "old"}, "other": {"text": "kept"}})
    found = replace_prompts(config, {"system": "new", "gone": "x"})
    assert {name: one.text for name, one in found.prompts.items()} == {"system": "new", "other": "kept"}
    with pytest.raises(PlaceError, match="has none of them"):
        replace_prompts(load(), {"system": "new"})


def test_what_changed() -> None:
    lines = list_differences({"a": "one\ntwo", "b": "same"}, {"a": "one\nthree", "b": "same"})
    assert lines == ["--- a before", "+++ a after", "@@ -1,2 +1,2 @@", " one", "-two", "+three"]
