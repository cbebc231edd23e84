"""Training shows that grammars work: the demo comes to its score with one in every turn."""

import json
from pathlib import Path

import pytest

from strop import demo
from tests import runs

HERE = Path(__file__).parent


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
