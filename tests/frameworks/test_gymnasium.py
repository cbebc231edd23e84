"""Environments of the real Gymnasium by their ids: three steps with the model in the box, from the command line."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from strop.types import Rollout, Turn
from tests.frameworks import environments
from tests.runs import Story, finish, story, strop

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]


@pytest.fixture
def python() -> Path:
    if not environments.ready("gymnasium"):
        pytest.skip("gymnasium is not installed: run `make frameworks`")
    return environments.program("gymnasium")


def train(python: Path, folder: Path, environment: str, *settings: str) -> Story:
    """Answers of one token, which for this model is mostly a digit: so that there are actions."""
    given = [
        *(f"tasks_args.environment={environment}", f"runner.python={python}", "policy.train.max_tokens=1"),
        *("loop.steps=3", "loop.groups=2", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4", *settings),
    ]
    which = ("strop.compat.gymnasium:agent", "--tasks", "strop.compat.gymnasium:tasks", "--model", "strop/nano")
    finish(strop("train", *which, "--folder", folder, *(f"--set={one}" for one in given)))
    told = story(folder)
    assert {(one.status, one.detail) for one in told.rollouts} == {("succeeded", None)}
    assert (len(told.rollouts), len(told.steps)) == (24, 3)
    for step in told.steps:
        assert step.metrics["training/rollout_logprobs_diff_max"] < 1e-4
    return told


def steps(rollout: Rollout, turns: list[Turn]) -> list[float]:
    """What each turn got of its own."""
    given = {one.turn: one.value for one in rollout.rewards if one.name == "step"}
    assert list(given) == [turn.id for turn in turns]
    total = next(one.value for one in rollout.rewards if one.name == "reward")
    assert total == sum(given.values()) == rollout.reward()
    return list(given.values())


def seen(turn: Turn) -> str:
    return turn.messages[-1]["content"]


def test_frozen_lake(python: Path, tmp_path: Path) -> None:
    """What is shown is where one has gone: every step follows from the action, by the lake's own rules."""
    told = train(
        python, tmp_path / "run", "FrozenLake-v1", "tasks_args.args.is_slippery=false", "tasks_args.max_turns=12"
    )
    moves = {"0": (0, -1), "1": (1, 0), "2": (0, 1), "3": (-1, 0)}
    moved = 0
    for rollout in told.rollouts:
        turns = told.turns[rollout.id]
        steps(rollout, turns)
        assert seen(turns[0]) == "[S]FFF\nFHFH\nFFFH\nHFFG\n0"
        row = column = 0
        for before, after in itertools.pairwise(turns):
            assert (after.parent, after.branch, after.shared) == (before.id, None, len(before.ids))
            if (said := before.answer["content"].strip()) in moves:
                down, right = moves[said]
                row, column = min(max(row + down, 0), 3), min(max(column + right, 0), 3)
                assert seen(after).endswith(f"\n{4 * row + column}")
                *_, first, second, third, fourth, _ = seen(after).splitlines()  # above them: which way one went
                drawn = [first, second, third, fourth][row]
                assert (drawn.index("["), drawn.replace("[", "").replace("]", "")) == (column, LAKE[row])
                moved += 1
            else:
                assert seen(after).startswith("error: ")
    assert moved > 20, "the model said hardly an action, so nothing was tried"
    assert any(len(told.turns[rollout.id]) < 12 for rollout in told.rollouts), "nobody fell into a hole"


def test_blackjack_is_rewarded_at_its_end(python: Path, tmp_path: Path) -> None:
    told = train(python, tmp_path / "run", "Blackjack-v1", "tasks_args.max_turns=8", 'tasks_args.actions=["stand","1"]')
    ended = 0
    for rollout in told.rollouts:
        turns = told.turns[rollout.id]
        *before, last = steps(rollout, turns)
        assert not any(before)
        ended += last != 0
        (cards,) = {seen(told.turns[one.id][0]) for one in told.rollouts if one.task.id == rollout.task.id}
        assert re.fullmatch(r"\[\d+,\d+,[01]\]", cards), "members of a group do not hold the same cards"
    assert ended, "no game was lost or won, so nothing was tried"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ("Nowhere-v1", "Nowhere-v1 was not made: "),
        ("CarRacing-v3", "CarRacing-v3 was not made: "),
        ("toys:Screen-v0", "what is seen in Box(0, 255, (210, 160, 3), uint8) is not a small text. Fix: "),
        ("toys:Both-v0", "actions of Tuple(Discrete(2), Discrete(2)) are not read from text. Fix: "),
    ],
)
def test_what_cannot_be_text_is_said(python: Path, tmp_path: Path, environment: str, why: str) -> None:
    (tmp_path / "toys.py").write_text(TOYS)
    (tmp_path / "tried.py").write_text(TRIED)
    done = subprocess.run(
        [str(python), "tried.py", environment],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(f"AgentError {why}"), done.stdout + done.stderr


TOYS = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Tuple


class Screen(gymnasium.Env):
    observation_space, action_space = Box(0, 255, (210, 160, 3), np.uint8), Discrete(2)

    def reset(self, **given):
        super().reset(seed=given.get("seed"))
        return self.observation_space.sample(), {}


class Both(Screen):
    action_space = Tuple([Discrete(2), Discrete(2)])


gymnasium.register("Screen-v0", Screen)
gymnasium.register("Both-v0", Both)
"""
TRIED = """
import sys
from strop.agent.functions import run_until_done
from strop.agent.llm import LLM
from strop.compat import gymnasium

(task,) = gymnasium.tasks(sys.argv[1], count=1, held=0)
llm = LLM(base_url="http://127.0.0.1:1/r/a/1/agents/main/v1", api_key="k", model="m", trace_id="", events_url="",
          rollout="a", task=task)
try:
    run_until_done(gymnasium.agent(task, llm))
except Exception as error:
    print(type(error).__name__, error)
"""
