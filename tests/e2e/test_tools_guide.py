"""The guide to tools as written: its agent trains, its programs run, its settings are settings, its links lead on."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from strop import config
from tests import runs

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "tools.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_programs_run(tmp_path: Path) -> None:
    agent, *programs = blocks("python")
    (server,) = [program for program in programs if "MCPServer(" in program]
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "server.py").write_text(server)
    said = [_run(program, tmp_path) for program in (agent, *programs) if program is not server]
    assert said[0].splitlines() == [
        "46",
        "{'type': 'object', 'properties': {'expression': {'description': 'like 12 + 34', 'type': 'string'}}, "
        "'required': ['expression']}",
        "error: KeyError: '/'",
    ]
    assert "sunny in Delft\nsunny in Delft\n" in said


def _run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_agent_trains_as_written(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(blocks("python")[0])
    tasks = re.search(r'^```\n(\{"id".*?)```', TEXT, re.DOTALL | re.MULTILINE)
    assert tasks
    (tmp_path / "tasks.jsonl").write_text(tasks[1])
    command = re.search(r"^strop (train agent\.py:agent (?:.*\\\n)*.*)$", TEXT, re.MULTILINE)
    assert command
    words = shlex.split(command[1].replace("\\\n", " "))
    small = ["--set", "loop.group_size=4", "--set", "policy.train.max_tokens=48", "--set", "policy.context=192"]
    small += ["--set", "runner.workers=4"]
    done = subprocess.run(runs.strop(*words, *small), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = runs.story(tmp_path / "runs/tools")
    assert len(told.steps) == 2
    assert any(rollout.reward("calls") for rollout in told.rollouts)
    assert all(rollout.status == "succeeded" for rollout in told.rollouts)


def test_settings_are_settings(tmp_path: Path) -> None:
    for text in blocks("toml"):
        (tmp_path / "run.toml").write_text(text)
        config.load(toml=tmp_path / "run.toml")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links
    assert all((PAGE.parent / link.partition("#")[0]).is_file() for link in links)
