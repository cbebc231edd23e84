"""The settings that the guide to environments shows are settings, and their tasks functions take what it gives them."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from strop.config import Config, load
from strop.imports import resolve

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "environments.md"
TEXT = GUIDE.read_text()


def test_tables() -> None:
    first, second = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
    msgspec.convert(first, Config)
    assert set(inspect.signature(resolve(first["tasks"], "tasks")).parameters) >= set(first["tasks_args"])
    assert callable(resolve(first["agent"], "agent"))
    msgspec.convert({**first, **second}, Config)


def test_commands() -> None:
    shown: dict[str, dict[str, Any]] = {}
    for block in re.findall(r"^```\n(strop train.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        words = shlex.split(block.replace("\\\n", " "))
        tasks = words[words.index("--tasks") + 1]
        sets = [after for before, after in pairwise(words) if before == "--set"]
        shown[tasks] = {"agent": words[2], **load(sets=[*sets, f"tasks={tasks}"]).tasks_args}
    assert set(shown) == {"strop.compat.gymnasium:tasks", "strop.compat.openenv:tasks"}
    for tasks, given in shown.items():
        assert callable(resolve(given.pop("agent"), "agent"))
        made: Any = resolve(tasks, "tasks")
        assert len(made(**given, count=2, held=1)) == 3


def test_the_table_of_settings_is_whole() -> None:
    from strop.compat import gymnasium

    shown = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE))))
    assert set(inspect.signature(gymnasium.tasks).parameters) <= shown
