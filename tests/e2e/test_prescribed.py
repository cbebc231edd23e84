"""Training on answers that follow a schema: they do, whatever API asks for them, and what is learned from is what was
drawn."""

import json
from pathlib import Path

import pytest

from strop import demo
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_is_learned_with_a_grammar_in_every_turn(tmp_path: Path) -> None:
    """Calls may come and, where they do, must follow the tool's schema: what is learned is to call, as in the demo."""
    given = demo.config()
    agent = HERE / "schema_demo.py"
    command = ["train", f"{agent}:agent", "--tasks", "strop.demo:tasks", "--model", "strop/nano"]
    settings = [
        *("policy.context=192", "policy.train.max_tokens=48", "policy.eval.max_tokens=48", "learner.token_budget=2048"),
        *("algorithm.settings.clip=0.3", "learner.optim.lr=3e-4", "learner.optim.warmup=3"),
        *(f"learner.optim.decay={given.learner.optim.decay}", f"loop.steps={given.loop.steps}", "seed=0"),
        *("engine.max_sequences=16", "engine.prefill_chunk=64", "runner.workers=16", "runner.timeout=60"),
    ]
    folder = tmp_path / "run"
    runs.finish([*runs.strop(*command, "--folder", folder), "--json", *(f"--set={one}" for one in settings)])
    told = runs.story(folder)
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert all(turn.sampling.grammar is not None for turn in turns)
    scores = [line for line in read_metrics(folder) if "val-core/test/reward/mean@1" in line]
    assert scores[0]["val-core/test/reward/mean@1"] < 0.4
    assert scores[-1]["val-core/test/reward/mean@1"] > 0.9, "the demo comes to .96"
    assert max(step.metrics["training/rollout_logprobs_diff_max"] for step in told.steps) < 1e-4


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
