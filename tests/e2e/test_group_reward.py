"""Rewards relative to a group, in whole runs: given once all members ended, trained on, and kept over a restart."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from strop.cli import main
from tests import runs

AGENT = """
import json
from pathlib import Path

from strop.rewards import math_equal

HERE = Path(__file__).parent


def agent(task, llm):
    messages = [{"role": "user", "content": task.data["question"]}]
    llm.client().chat.completions.create(model=llm.model, messages=messages, max_tokens=12)
    if llm.rollout.endswith(".3"):
        raise RuntimeError("this member always fails")
    return {"own": math_equal(r"\\sqrt{4}", "2", seconds=60)}


def told(task, answers, numbers):
    with (HERE / "asked.jsonl").open("a") as file:
        file.write(json.dumps([task.id, answers, numbers]) + "\\n")


def longest(task, answers):
    lengths = [len(answer or "") for answer in answers]
    told(task, answers, lengths)
    return [{"win": sum(n > other for other in lengths) / 3} for n in lengths]


def hangs(task, answers):
    import time

    time.sleep(120)


async def drawn(task, answers, samples):  # never the same twice
    import random

    assert [sample.rollout.member for sample in samples] == [0, 1, 2, 3] and samples[0].turns
    numbers = [random.SystemRandom().random() for _ in answers]
    told(task, answers, numbers)
    if len((HERE / "asked.jsonl").read_text().splitlines()) == 4:
        raise ValueError("it is broken")
    return [{"win": number} for number in numbers]
"""
TASKS = [{"id": name, "data": {"question": f"What is {n} + 30?"}} for n, name in enumerate("abc", 12)]
SETTINGS = ["loop.groups=2", "loop.group_size=4", "algorithm.rewards.win=1", "runner.workers=4", "loop.eval_splits=[]"]


def train(place: Path, function: str, *settings: str) -> list[str]:
    (place / "agent.py").write_text(AGENT)
    (place / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    command = runs.strop("train", place / "agent.py:agent", "--tasks", place / "tasks.jsonl", "--model", "strop/nano")
    given = [*SETTINGS, f"group_reward={place / 'agent.py'}:{function}", *settings]
    return [*command, "--folder", str(place / "run"), "--json", *(f"--set={one}" for one in given)]


def asked(place: Path) -> list[list]:
    return [json.loads(line) for line in (place / "asked.jsonl").read_text().split("\n") if line]


def test_a_reward_that_no_group_gives_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    command = [one.replace("rewards.win", "rewards.wins") for one in train(tmp_path, "longest", "loop.steps=1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "algorithm.rewards counts wins" in done.stderr
    assert "own, win" in done.stderr
    assert not runs.story(tmp_path / "run").steps


@pytest.mark.slow
def test_a_function_that_never_returns_is_not_waited_for(tmp_path: Path) -> None:
    command = train(tmp_path, "hangs", "loop.steps=1", "loop.group_deadline=25")
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2, done.stderr
    assert "group_reward took longer than loop.group_deadline (25 s)" in done.stderr
    assert not runs.story(tmp_path / "run").steps


def test_every_member_gets_its_own_and_trains_on_it(tmp_path: Path) -> None:
    runs.finish(train(tmp_path, "longest", "loop.steps=1"))
    told = runs.story(tmp_path / "run")
    assert len(asked(tmp_path)) == 2
    for group in {rollout.group for rollout in told.rollouts}:
        members = [rollout for rollout in told.rollouts if rollout.group == group]
        lengths = next(
            lengths for task, answers, lengths in asked(tmp_path)
            if task == members[0].task.id and answers == [said(told, member) for member in members]
        )  # fmt: skip
        for member, length in zip(members, lengths, strict=True):
            if member.member == 3:
                assert (member.status, member.reward("win"), length) == ("failed", None, 0)
            else:
                assert member.reward("win") == sum(length > other for other in lengths) / 3
                assert member.reward("own") == 1.0
    assert all("reward/win" in step.metrics for step in told.steps)
    assert all(step.metrics["critic/rewards/max"] <= 1.0 for step in told.steps)
    assert all(step.metrics["timing_s/group_reward"] >= 0.0 for step in told.steps)


def said(told: runs.Story, member) -> str | None:
    return told.turns[member.id][-1].answer.get("content", "") if member.status == "succeeded" else None


@pytest.mark.slow
def test_a_resumed_run_keeps_the_numbers(tmp_path: Path) -> None:
    """The function breaks on the last group of the second step. Resumed, the first step is made again, and the numbers
    that were given before are used, although the function would say others now."""
    command = train(tmp_path, "drawn", "loop.steps=2", "loop.checkpoint_every=2", "engine.deterministic=true")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    assert "got no rewards (ValueError: it is broken). Fix: correct the function, then resume" in done.stderr
    before = given(tmp_path)
    assert len(before) == 9  # three groups of which one member failed
    first = runs.story(tmp_path / "run").steps[0]
    runs.finish(runs.strop("train", "--resume", tmp_path / "run", "--json"))
    after = given(tmp_path)
    assert {id: after[id] for id in before} == before
    assert len(after) == 12
    assert len(asked(tmp_path)) == 5  # only the group that had got none
    told = runs.story(tmp_path / "run")
    assert [step.number for step in told.steps] == [1, 2]
    again = told.steps[0]
    assert (again.lineage, again.digest) == (2, first.digest)
    assert again.metrics["reward/win"] == first.metrics["reward/win"]


def given(place: Path) -> dict[str, float]:
    rollouts = runs.story(place / "run").rollouts
    return {rollout.id: value for rollout in rollouts if (value := rollout.reward("win")) is not None}


@pytest.mark.parametrize(("function", "why"), [("nobody", "group_reward: "), ("HERE", "f(task, answers)")])
def test_a_function_that_cannot_be_used_is_said_at_once(
    tmp_path: Path, function: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train(tmp_path, function, "loop.steps=1")
    assert main(command[3:]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
