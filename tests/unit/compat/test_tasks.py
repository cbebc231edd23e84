"""Which rows are kept aside, for any system's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strop.compat import openenv, verifiers
from strop.compat.tasks import split_rows
from strop.compat.verifiers import environments
from strop.errors import TaskError


def test_the_last_ones_are_kept_aside() -> None:
    assert split_rows([1, 2, 3], 2, "rows") == ([1], [2, 3])
    assert split_rows([1, 2], 0, "rows") == ([1, 2], [])
    assert split_rows([], 0, "rows") == ([], [])


@pytest.mark.parametrize(("held", "most"), [(3, 2), (4, 2), (-1, 2)])
def test_some_are_left_to_train_on(held: int, most: int) -> None:
    with pytest.raises(TaskError, match=rf"held is {held}, of 3 rows, .* Fix: set it to a number from 0 to {most}"):
        split_rows([1, 2, 3], held, "rows")


def test_resets_of_openenv() -> None:
    resets: list[Any] = [{"level": 1}, {"level": 2}, {"level": 3}]
    with pytest.raises(TaskError, match="held is 16, of 3 resets"):  # as it is where nobody says it
        openenv.tasks("http://127.0.0.1:1", resets=resets)
    made = openenv.tasks("http://127.0.0.1:1", resets=resets, held=1, calls=True)
    assert [(task.id, task.split, task.data["reset"]) for task in made] == [
        ("train-0", "train", {"level": 1}),
        ("train-1", "train", {"level": 2}),
        ("test-2", "test", {"level": 3}),
    ]
    assert made[0].data["calls"] is True
    seeds = openenv.tasks("http://127.0.0.1:1", count=0, held=2, seed=7)
    assert [(task.split, task.data["reset"]) for task in seeds] == [("test", {"seed": 7}), ("test", {"seed": 8})]


def test_rows_of_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SimpleNamespace(to_list=lambda: [{"question": n} for n in range(3)])
    environment = SimpleNamespace(dataset=rows, get_dataset=lambda most: rows)
    monkeypatch.setattr(verifiers, "_is_taskset", lambda name: False)
    monkeypatch.setattr(environments, "load", lambda name, args: environment)
    with pytest.raises(TaskError, match="held is 3, of 3 rows"):
        verifiers.tasks("wordle", held=3)
    assert [task.id for task in verifiers.tasks("wordle", held=1)] == ["train-0", "train-1", "test-0"]
