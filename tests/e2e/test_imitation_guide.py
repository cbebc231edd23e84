"""The guide to imitation as written: its files are files, its commands run."""

import re
import shlex
import subprocess
from pathlib import Path

from strop import config
from tests import runs

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "imitation.md").read_text()
SMALL = ["runner.workers=4", "loop.eval_greedy=false", "learner.token_budget=2048", "engine.max_sequences=16"]


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def run(line: str, folder: Path, *sets: str) -> str:
    words = [*shlex.split(line)[1:], *(f"--set={one}" for one in (*SMALL, *sets))]
    done = subprocess.run(runs.strop(*words), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_commands_run_as_written(tmp_path: Path) -> None:
    small = [f"tasks={Path(runs.__file__).parent / 'small.py'}:tasks", "tasks_args={}"]
    (tmp_path / "imitate.toml").write_text(blocks("toml")[0])
    first, taught, after, chats = (line for line in "".join(blocks("")).splitlines() if line.startswith("strop "))
    run(first, tmp_path, *small, "loop.groups=8", "loop.group_size=8", "loop.eval_splits=[]")
    said = run(taught, tmp_path, *small)
    assert re.search(r"learning from \d+ of 256 rollouts, 2 epochs in \d+ steps of 32; left out: \d+ below", said)
    run(after, tmp_path, "loop.groups=2", "loop.group_size=2", "loop.steps=1")
    told = runs.story(tmp_path / "runs/taught")
    assert {name for step in told.steps for name in step.metrics if "_loss" in name} == {"actor/sft_loss"}
    (tmp_path / "chats.jsonl").write_text(next(block for block in blocks("") if block.startswith('{"messages"')))
    run(chats, tmp_path)
    told = runs.story(tmp_path / "runs/chats")
    assert len(told.rollouts) == 3 * 4
    assert sum(step.metrics.get("filter_tokens/zero_weight", 0.0) for step in told.steps) > 0
    tools = next(turns for turns in told.turns.values() if len(turns) == 2 and turns[0].finish == "tool_calls")
    assert tools[1].shared == len(tools[0].ids)


def test_settings_are_settings(tmp_path: Path) -> None:
    from strop.algorithms import make

    for number, block in enumerate(blocks("toml")):
        (tmp_path / f"{number}.toml").write_text(block)
        made = config.load(toml=tmp_path / f"{number}.toml")
        if made.algorithm.name == "grpo":  # a table by itself, of the algorithm that the page is about
            made = config.load(base=made, algorithm={"name": "sft"})
        make(made.algorithm, made.learner, made.policy)
