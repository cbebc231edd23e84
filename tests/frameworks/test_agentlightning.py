"""Agents of Agent Lightning's examples that need a framework: three steps with the model in the box.

The files are those of its repositories, each with the line changed that imports it, where it does.
"""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import strop
from tests.frameworks import environments
from tests.runs import Story, story

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
THEIRS = SHARED / "peers" / "agentlightning"
LOOP = {"steps": 3, "groups": 2, "group_size": 2, "eval_splits": []}
POLICY = {"train": {"max_tokens": 12}}
IMPORT = "import agentlightning as agl\n"
OURS = "import strop.compat.agentlightning as agl\n"
CALC = SHARED / "data" / "agent_lightning" / "calc_x_sample.jsonl"


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment's Python, which agents and their tools find as `python` too."""
    environment: str = request.param
    if not environments.ready(environment):
        pytest.skip(f"{environment} is not installed: run `make frameworks`")
    if not THEIRS.is_dir():
        pytest.skip(f"{THEIRS} is not here")
    program = environments.program(environment)
    (tools := tmp_path / "bin").mkdir()
    (tools / "uvx").write_text('#!/bin/sh\nexec python -m "$(echo "$1" | tr - _)"\n')  # from the environment
    (tools / "uvx").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def change(source: Path, to: Path, before: str, after: str) -> Path:
    text = source.read_text()
    assert text.count(before) == 1
    (to / source.name).write_text(text.replace(before, after))
    return to / source.name


def train(agent: str, tasks: list[Any], folder: Path, **settings: Any) -> Story:
    settings = {"loop": LOOP, "policy": POLICY, "runner": {"workers": 2}} | settings
    strop.train(agent, tasks, model="strop/nano", folder=folder, quiet=True, **settings)
    told = story(folder)
    assert {(one.status, one.detail) for one in told.rollouts} == {("succeeded", None)}
    assert all(one.reward() is not None and told.turns[one.id] for one in told.rollouts)
    assert (len(told.rollouts), len(told.steps)) == (12, 3)
    return told


def calc_tasks() -> list[Any]:
    rows = [json.loads(line) for line in CALC.read_text().splitlines()[:4]]
    return [{"id": row["id"], "data": row} for row in rows]


@pytest.mark.parametrize("python", ["agentlightning-calc"], indirect=True)
def test_calc_x_of_1_0(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoGen with a calculator over MCP, unchanged, started by our launcher."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(THEIRS / "v1" / "calc_x")]))
    launch = "-m strop.compat.agentlightning.launch calc_agent.Agent QUESTION=input.question RESULT=input.result"
    told = train(f"{python} {launch}", calc_tasks(), tmp_path / "run")
    assert all(turn.requested["tools"] for turn in next(iter(told.turns.values())))


@pytest.mark.parametrize("python", ["agentlightning-calc"], indirect=True)
def test_calc_x_of_0_3(python: Path, tmp_path: Path) -> None:
    agent = change(THEIRS / "v0/calc_x/calc_agent.py", tmp_path, IMPORT, OURS)
    reward = "from agentlightning.reward import reward\n"
    change(THEIRS / "v0/calc_x/eval_utils.py", tmp_path, reward, "from strop.compat.agentlightning import reward\n")
    runner = {"workers": 2, "python": str(python)}
    train(f"{agent}:calc_agent", calc_tasks(), tmp_path / "run", runner=runner)


@pytest.mark.parametrize("python", ["agentlightning-calc"], indirect=True)
def test_calc_x_as_it_was_before_0_2(python: Path, tmp_path: Path) -> None:
    """A class with the arguments of 0.1, whose trainer was given an object of it: the file beside it makes that."""
    before = "from agentlightning import LLM, LitAgent, NamedResources, Trainer, setup_logging\n"
    change(
        THEIRS / "v0/calc_x/legacy_calc_agent.py", tmp_path, before, before.replace("agent", "strop.compat.agent", 1)
    )
    reward = "from agentlightning.reward import reward\n"
    change(THEIRS / "v0/calc_x/eval_utils.py", tmp_path, reward, "from strop.compat.agentlightning import reward\n")
    (tmp_path / "agent.py").write_text("from legacy_calc_agent import LegacyCalcAgent\n\nagent = LegacyCalcAgent()\n")
    runner = {"workers": 2, "python": str(python)}
    train(f"{tmp_path / 'agent.py'}:agent", calc_tasks(), tmp_path / "run", runner=runner)


@pytest.mark.parametrize("python", ["agentlightning-spider"], indirect=True)
def test_spider_of_0_3(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LangGraph writes, checks and rewrites SQL; the file beside it makes the object that its trainer was given."""
    source = THEIRS / "v0" / "spider"
    change(source / "sql_agent.py", tmp_path, IMPORT, OURS)
    (tmp_path / "spider_eval").symlink_to(source / "spider_eval")
    (tmp_path / "agent.py").write_text(
        "from sql_agent import LitSQLAgent\n\nagent = LitSQLAgent(table_info_truncate=300)\n"
    )
    rows = [
        json.loads(line) for line in (SHARED / "data" / "spider" / "train_small_dbs.jsonl").read_text().splitlines()
    ]
    for row in rows[:4]:
        place = tmp_path / "data" / "database" / row["db_id"]
        if not place.exists():
            place.mkdir(parents=True)
            original = next((SHARED / "data" / "spider" / "database").rglob(f"{row['db_id']}.sqlite"))
            (place / original.name).write_bytes(original.read_bytes())
            with sqlite3.connect(original) as db:
                made = [line for (line,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
            (place / "schema.sql").write_text(";\n".join(made))
    monkeypatch.setenv("VERL_SPIDER_DATA_DIR", str(tmp_path / "data"))
    tasks = [{"id": str(n), "data": row} for n, row in enumerate(rows[:4])]
    runner = {"workers": 2, "python": str(python)}
    train(f"{tmp_path / 'agent.py'}:agent", tasks, tmp_path / "run", runner=runner)
