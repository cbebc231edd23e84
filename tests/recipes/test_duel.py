"""The duel: who wins what, games that are held out, and real steps with one side trained or both."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from strop import config
from strop.testing import call, run
from strop.types import Task
from tests import runs
from tests.recipes.trained import ROOT

agent, data = (importlib.import_module(f"recipes.duel.{name}") for name in ("agent", "data"))
SHORT = ("loop.steps=2", "loop.groups=2", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=8")


@pytest.mark.parametrize(("size", "trained"), [("laptop", ["left"]), ("both", ["left", "right"])])
def test_configs_are_whole(size: str, trained: list[str]) -> None:
    found = config.load(toml=ROOT / "recipes" / "duel" / f"{size}.toml")
    assert (ROOT / found.agent.partition(":")[0]).is_file()
    assert list(config.trained_policies(found)) == trained


def test_games_that_are_held_out_share_no_operands() -> None:
    games = data.tasks(games=50)
    assert [sum(game.split == split for game in games) for split in ("train", "test")] == [200, 50]
    asked = {
        split: {q["calls"][0] for g in games if g.split == split for q in g.data["questions"]}
        for split in ("train", "test")
    }
    assert not asked["train"] & asked["test"]
    assert len(asked["test"]) > 140


def question(text: str, answer: int) -> dict[str, Any]:
    return {"question": f"What is {text}?", "calls": [text], "answer": answer}


def test_who_wins() -> None:
    """Left uses its calculator for the first question; nobody answers another one rightly."""
    task = Task(id="t", data={"questions": [question("1 + 2", 3), question("2 + 2", 4), question("3 * 3", 9)]})
    guess = "The answer is 5."
    answers = [call("calculator", expression="1 + 2"), "1 + 2 = 3.", guess, guess, guess, guess, guess]
    trial = run(agent.play, task, answers=answers)
    assert {(reward.name, reward.agent, reward.value) for reward in trial.rewards} == {
        ("score", "left", 1.0),
        ("score", "right", 0.0),
        ("points", "left", 1.0),
        ("points", "right", 0.0),
        ("reward", None, 1.0),
    }
    assert [turn.agent for turn in trial.turns] == ["left"] * 4 + ["right"] * 3
    assert [agent.score(*points) for points in ((1, 1), (0, 3))] == [0.5, 0.0]


@pytest.mark.parametrize("size", ["laptop", "both"])
def test_two_steps(tmp_path: Path, size: str) -> None:
    folder = tmp_path / "run"
    options = ("--config", ROOT / "recipes" / "duel" / f"{size}.toml", "--folder", folder, "--json")
    runs.finish(runs.strop("train", *options, *(f"--set={one}" for one in SHORT)), cwd=ROOT)
    for step in runs.story(folder).steps:
        metrics = step.metrics
        assert metrics["agents/left/tokens"] > 0
        assert (metrics["agents/right/tokens"] > 0, metrics["agents/right/loss_tokens"] > 0) == (True, size == "both")
        assert metrics["agents/left/reward/score"] + metrics["agents/right/reward/score"] == pytest.approx(1.0)
        assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    assert (folder / "agents.png").stat().st_size > 5000
