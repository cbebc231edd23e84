"""Training on answers that follow a schema: they do, whatever API asks for them, and what is learned from is what was
drawn."""

import json
from pathlib import Path

from tests import runs
from tests.e2e.prescribed import SCHEMA

HERE = Path(__file__).parent


def test_every_answer_follows_its_schema_and_the_learner_finds_the_same_logprobs(tmp_path: Path) -> None:
    agent = HERE / "prescribed.py"
    command = [
        "train",
        f"{agent}:agent",
        "--tasks",
        f"{agent}:tasks",
        "--model",
        "strop/nano",
        "--folder",
        tmp_path / "run",
    ]
    settings = ["loop.steps=2", "loop.groups=4", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4"]
    settings += ["policy.train.max_tokens=200", "learner.optim.lr=3e-4", "algorithm.name=ppo", "gateway.workers=2"]
    runs.finish([*runs.strop(*command), "--json", *(f"--set={one}" for one in settings)])
    told = runs.story(tmp_path / "run")
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
