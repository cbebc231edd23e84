"""The package itself: its public names, its light imports, its settings, and the README as written."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import strop
from strop import config
from strop.errors import ConfigError
from tests import runs

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
NEXT_STEPS = (ROOT / "docs" / "guides" / "next-steps.md").read_text()
PUBLIC = """
APO DPO Distill GEPA GRPO DrGRPO GiGPO PPO RLOO ReinforcePP SFT evaluate export resume train
Config Event LLM Policy Retry Reward Rollout Sampling Scripted StropError Task Turn __version__ open_store
Environment EnvironmentAgent Episode ToolAgent Transition tool
"""


def test_public_names_are_pinned() -> None:
    assert sorted(strop.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(strop, name) for name in strop.__all__)


@pytest.mark.parametrize(
    "module",
    [
        *(
            "strop",
            "strop.cli",
            "strop.run.loop",
            "strop.run.runtime",
            "strop.run.evaluate",
            "strop.run.api",
            "strop.run.start_from",
        ),
        *("strop.gateway.app", "strop.run.serve", "strop.runners.pool"),
    ],
)
def test_the_core_imports_without_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'matplotlib', 'vllm', 'ray', 'datasets', 'pyarrow', 'psycopg'}"
    code = f"import sys, {module}; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_folder_of_tests_is_a_package() -> None:
    """Otherwise any two conftest.py, or two tests of one name, cannot be collected together."""
    folders = {file.parent for pattern in ("test_*.py", "conftest.py") for file in (ROOT / "tests").rglob(pattern)}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_settings_survive_a_file_and_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('seed = 3\n[loop]\nsteps = 7\neval_splits = ["dev"]\n')
    made = config.load(toml=tmp_path / "run.toml", sets=["loop.steps=9", "learner.optim.lr=1e-4"], agent="a.py:f")
    assert (made.seed, made.loop.steps, made.loop.eval_splits, made.agent) == (3, 9, ("dev",), "a.py:f")
    assert made.learner.optim.lr == 1e-4
    assert config.from_json(config.to_json(made)) == made


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("loop.stpes=3", "write loop.steps"),
        ("lr=1", "write learner.optim.lr"),
        ("loop=3", "section"),
        ("loop.steps=many", "loop.steps"),
        ("loop.groups=0", "loop.groups"),
        ("loop.steps", "="),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_way_out(setting: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(sets=[setting])
    assert hint in str(refused.value)


def test_every_setting_has_its_line() -> None:
    for setting in config.settings():
        assert setting.doc, setting.key


def test_the_readme_links_to_what_exists() -> None:
    for place in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (ROOT / place).exists(), place


def test_the_readme_agent_trains_as_written(tmp_path: Path) -> None:
    """Its blocks are saved under the names it gives them, and its command is run."""
    (tmp_path / "agent.py").write_text(_block("python"))
    (tmp_path / "tasks.jsonl").write_text(_block("json"))
    command = re.search(r"^(\.venv/bin/strop train agent\.py:agent (?:.*\\\n)*.*)$", README, re.MULTILINE)
    assert command
    words = shlex.split(command[1].replace("\\\n", " "))
    assert words[0] == ".venv/bin/strop"
    done = subprocess.run(
        [*runs.strop(*words[1:])], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["end"] > summary["start"]  # it has learnt what it is told it learns


@pytest.mark.slow
def test_the_script_of_the_next_steps_trains_as_written(tmp_path: Path) -> None:
    """The same from Python, behind the agent in its file."""
    (tmp_path / "agent.py").write_text(_block("python") + "\n\n" + _block("python", NEXT_STEPS))
    (tmp_path / "tasks.jsonl").write_text(_block("json"))
    done = subprocess.run([sys.executable, "agent.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "step 8/8" in done.stdout
    assert json.loads((tmp_path / "runs/python/summary.json").read_text())["steps"] == 8


def _block(language: str, page: str = README) -> str:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0]
