"""The examples in recipes' docstrings, where nothing but strop is needed to run them."""

import doctest
import importlib
import subprocess
from pathlib import Path

import pytest

from recipes.prepare import python_of, ready

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    f"recipes.{file.parent.name}.{file.stem}"
    for file in ROOT.glob("recipes/*/*.py")
    if file.stem in ("data", "reward", "rewards", "calculator", "paragraphs")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / name.split(".")[1]))  # files of a recipe import each other
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.frameworks
@pytest.mark.parametrize("recipe", ["sql", "calc"])
def test_examples_of_agents(recipe: str) -> None:
    if not ready(recipe):
        pytest.skip(f".recipes/{recipe} is not there: make recipes")
    command = [str(python_of(recipe)), "-m", "doctest", f"recipes/{recipe}/agent.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
