"""The guide for people from Agent Lightning as written: its agents train by its commands."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from strop.compat.agentlightning import missing
from strop.store.server.agentlightning.routes import REFUSED
from tests import runs

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "from-agent-lightning.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    block.replace("\\\n", " ").strip() for block in re.findall(r"```\n((?:python|strop) .*?)```", TEXT, re.DOTALL)
]
SMALL = ["loop.steps=2", "loop.groups=2", "loop.group_size=2", "policy.train.max_tokens=8", "loop.eval_splits=[]"]
TASKS = [{"question": "What is 12 + 30?", "answer": "42"}, {"question": "Compute 64 - 17.", "answer": "47"}]


def run(command: str, folder: Path) -> None:
    program, *words = shlex.split(command)
    words = [word.replace("python ", f"{sys.executable} ", 1) for word in words]
    whole = runs.strop(*words, *(f"--set={one}" for one in SMALL)) if program == "strop" else [sys.executable, *words]
    runs.finish(whole, cwd=folder)


def check(folder: Path, steps: int) -> None:
    told = runs.story(folder)
    assert len(told.steps) == steps
    assert {(one.status, one.detail) for one in told.rollouts} == {("succeeded", None)}
    assert all(one.reward() is not None for one in told.rollouts)


def test_its_commands_train(tmp_path: Path) -> None:
    for program in PROGRAMS:
        name = re.match(r"# (\w+\.py)", program)
        assert name
        (tmp_path / name[1]).write_text(program)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    by_script, by_command, launched = COMMANDS
    run(by_script, tmp_path)
    check(tmp_path / "runs/calc", 3)
    run(by_command, tmp_path)
    check(tmp_path / "runs/calc-by-command", 2)
    run(launched, tmp_path)
    check(tmp_path / "runs/launched", 2)


def test_what_is_refused_stands_in_the_table() -> None:
    for method, path in REFUSED:
        assert re.search(rf"^\| .*{method}.*501", TEXT, re.MULTILINE), method
        assert path in TEXT


def test_the_names_that_are_missing_import_and_no_more() -> None:
    for name in missing.INSTEAD:
        assert missing.find_missing(name).__name__ == name
