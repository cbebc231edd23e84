"""Training and evaluating from Python: in a script, in a notebook's way, in a test, and where it goes wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.config import Config
from strop.errors import ConfigError, PlaceError
from strop.run import api
from tests import runs

SMALL = {"loop": {"steps": 2, "groups": 2, "group_size": 2}, "runner": {"workers": 2}, "quiet": True}
QUESTIONS = [
    {"id": "a", "data": {"question": "What is 12 + 30?"}},
    {"id": "b", "data": {"question": "Compute 64 - 17."}},
    {"id": "c", "split": "test", "data": {"question": "What is 14 + 22?"}},
]


def asked(task: strop.Task, llm: strop.LLM) -> float:
    messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
    answer = llm.client().chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    return float("1" in (answer.choices[0].message.content or ""))


def test_a_function_and_a_list_of_tasks_are_enough(tmp_path: Path) -> None:
    """Made here, it has no file that another process could find it in; and a loop is running already."""
    length = 4

    def agent(task, llm):  # type: ignore[no-untyped-def]
        messages = [{"role": "user", "content": task.data["question"]}]
        answer = llm.client().chat.completions.create(model=llm.model, messages=messages, max_tokens=length)
        return float(answer.usage.completion_tokens == length)

    async def notebook() -> object:
        return strop.train(
            agent, QUESTIONS, model="strop/nano", folder=tmp_path / "run", algorithm=strop.RLOO(clip=0.3), **SMALL
        )

    summary = asyncio.run(notebook())
    assert (summary.steps, summary.model) == (2, "strop/nano")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["algorithm"]
    assert (settings["name"], settings["settings"]) == ("rloo", {"clip": 0.3})
    told = runs.story(tmp_path / "run")
    assert len([r for r in told.rollouts if r.mode == "train"]) == 8
    assert all(len(turn.response_ids) <= length for turns in told.turns.values() for turn in turns)


@pytest.mark.slow
def test_two_models_on_the_same_tasks(tmp_path: Path) -> None:
    report = strop.evaluate(
        asked, QUESTIONS, model=["strop/nano", "strop/nano"], folder=tmp_path / "eval", quiet=True,
        engine={"deterministic": True}, runner={"workers": 2},
    )  # fmt: skip
    (comparison,) = report.comparisons
    assert {difference.value for difference in comparison.differences.values()} == {0.0}


def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent("""
            import strop

            def agent(task, llm):
                return 1.0

            strop.train(agent, [{"id": "a"}, {"id": "b", "split": "test"}], folder="run", quiet=True)
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda at: strop.train(folder=at), "which agent"),
        (lambda at: strop.train("strop.demo:agent", folder=at), "which tasks"),
        (lambda at: strop.GRPO(clipp=0.1), "clip"),
        (lambda at: strop.train("strop.demo:agent", QUESTIONS, folder=at, loop={"step": 1}), "steps"),
        (lambda at: strop.train(open(sys.executable).readline, QUESTIONS, folder=at), "file of its own"),  # noqa: SIM115
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, call, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        call(tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_folder_with_a_run_keeps_its_files(tmp_path: Path) -> None:
    """The tasks and the agent of the first run are still needed to resume it: the second has its own folder."""
    made = {"config.json": "{}", "tasks.jsonl": "of the first run", "agent_given.pkl": "the first agent"}
    (tmp_path / "run").mkdir()
    for name, text in made.items():
        (tmp_path / "run" / name).write_text(text)
    summary = strop.train(lambda task, llm: 1.0, QUESTIONS, folder=tmp_path / "run", **{**SMALL, "loop": {"steps": 0}})
    assert {file.name: file.read_text() for file in (tmp_path / "run").iterdir()} == made
    assert summary.folder == str(tmp_path / "run-2")
    assert (tmp_path / "run-2" / "agent_given.pkl").exists()


def test_an_evaluation_that_is_there_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    with pytest.raises(PlaceError, match="is there already"):
        strop.evaluate(lambda task, llm: 1.0, QUESTIONS, folder=tmp_path / "eval")
    assert not (tmp_path / "eval-given").exists()


@pytest.mark.parametrize("kind", ["a file", "an object"])
def test_the_folder_of_a_configuration_counts_unless_another_is_given(tmp_path: Path, kind: str) -> None:
    mine, recipe = str(tmp_path / "mine"), tmp_path / "recipe.toml"
    recipe.write_text(f'folder = "{mine}"\nseed = 3\n')
    config = recipe if kind == "a file" else Config(folder=mine, seed=3)

    def made(folder: Path | None) -> Config:
        return api._config("strop.demo:agent", QUESTIONS, "", None, None, folder, None, config, {"loop": {"steps": 2}})

    given = made(None)
    assert (given.folder, given.tasks, given.seed, given.loop.steps) == (mine, f"{mine}/tasks.jsonl", 3, 2)
    assert made(tmp_path / "other").folder == str(tmp_path / "other")
