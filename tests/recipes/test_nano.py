"""The recipe nano: its files are what the demo runs, what the model is made of, and three steps with it."""

import random
from pathlib import Path

import pytest

from recipes.nano.data import conversation
from strop import demo
from strop.config import load
from tests.recipes.trained import ROOT, train


@pytest.mark.parametrize(("file", "kind"), [("laptop", "calc"), ("chain", "chain")])
def test_configs_are_what_the_demo_runs(file: str, kind: str) -> None:
    assert load(toml=ROOT / "recipes" / "nano" / f"{file}.toml") == demo.config(kind)


@pytest.mark.parametrize(("kind", "calls"), [("calc", 1), ("chain", 2)])
def test_conversations_teach_the_tool_and_then_to_do_without_it(kind: str, calls: int) -> None:
    rng = random.Random(0)
    asked = {task.data["question"] for task in demo.tasks(kind) if task.split != "train"}
    clean, careless = [[conversation(rng, kind, careless) for _ in range(500)] for careless in (False, True)]
    assert {sum("tool_calls" in message for message in messages) for messages in clean} == {calls}
    right = [sum("tool_calls" in message for message in messages) == calls for messages in careless]
    assert 0.01 < sum(right) / len(right) < 0.4
    assert not asked & {messages[0]["content"] for messages in clean + careless}


@pytest.mark.slow
def test_three_steps(tmp_path: Path) -> None:
    sets = ("loop.steps=3", "loop.groups=4", "loop.group_size=4", "loop.eval_splits=[]")
    trained = train("nano", tmp_path, *sets)
    branches = trained.check()
    assert set(branches) == {None}
    assert len(trained.rollouts) == 48
    called = [rollout for rollout in trained.rollouts if len(trained.turns(rollout)) > 1]
    assert called, "the model never used its tool"
    for rollout in called:
        words = [text for _, text in trained.loss_text(rollout.id)]
        assert len(words) == len(trained.turns(rollout))
        assert all("<tool_call>" in text for text in words[:-1])
        assert not any("<|im_start|>" in text for text in words)  # nothing but what was sampled
        assert {reward.turn for reward in rollout.rewards} == {None}  # its rewards are the whole rollout's
