"""Where stored data comes from, under one name however it is written."""

from pathlib import Path

import pytest

from strop.config import load
from strop.run.settings import settle


def test_two_spellings_are_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x" / "rl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x")
    given = {"runs": ["rl", "../x/rl", "gone"], "mix": {"../x/rl": 2.0}}
    settings = settle(load(algorithm={"name": "sft", "settings": given})).algorithm.settings
    place = str((tmp_path / "x" / "rl").resolve())
    assert settings["runs"] == [place, place, "gone"]
    assert settings["mix"] == {place: 2.0}
