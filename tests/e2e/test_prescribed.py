"""Training on answers that follow a schema: they do, whatever API asks for them, and what is learned from is what was
drawn."""

import json
from pathlib import Path
from typing import Any

from tests import runs
from tests.e2e.prescribed import SCHEMA

HERE = Path(__file__).parent


SETTINGS = ["loop.steps=2", "loop.groups=4", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4"]
SETTINGS += ["policy.train.max_tokens=200", "learner.optim.lr=3e-4", "algorithm.name=ppo", "gateway.workers=2"]


def train(name: str, folder: Path, *settings: str) -> Any:
    """What a run of two steps with this agent has left."""
    agent = HERE / name
    command = ["train", f"{agent}:agent", "--tasks", f"{agent}:tasks", "--model", "strop/nano", "--folder", folder]
    runs.finish([*runs.strop(*command), "--json", *(f"--set={one}" for one in (*SETTINGS, *settings))])
    return runs.story(folder)


def test_every_answer_follows_its_schema_and_the_learner_finds_the_same_logprobs(tmp_path: Path) -> None:
    told = train("prescribed.py", tmp_path / "run")
    assert all(rollout.status == "succeeded" for rollout in told.rollouts), "an answer does not follow the schema"
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert len(turns) == 32
    for turn in turns:
        assert turn.sampling.grammar is not None
        assert json.dumps(SCHEMA["required"]) in turn.sampling.grammar.text
    forced = [logprob for turn in turns for logprob in turn.logprobs if logprob == 0.0]
    assert len(forced) > len(turns), "where nothing else may come a token has logprob 0"
    for step in told.steps:
        assert step.metrics["training/rollout_logprobs_diff_max"] < 1e-4
        assert step.metrics["actor/grad_norm"] > 0


def test_strict_tools_in_every_turn(tmp_path: Path) -> None:
    told = train("strict_tools.py", tmp_path / "run", "loop.groups=12", "loop.group_size=2")
    failed = [rollout.id for rollout in told.rollouts if rollout.status != "succeeded"]
    assert not failed, "a call does not follow its tool's schema, or was not made"
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert len(turns) == 48
    assert all(turn.sampling.grammar is not None for turn in turns)
    called = [turn for turn in turns if turn.answer.get("tool_calls")]
    assert len(called) >= 12, "where they are demanded, as far as they are not cut off"
    assert not any("lead" in turn.requested for turn in turns), "nothing is said for the model"
    for step in told.steps:
        assert step.metrics["training/rollout_logprobs_diff_max"] < 1e-4
        assert step.metrics["actor/grad_norm"] > 0
