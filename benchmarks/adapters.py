"""An update of two adapters on one model beside an update of one adapter with the same turns.

    python benchmarks/adapters.py [RUN] [--laps 7] [--json FILE]

RUN is a run of recipes/duel, whose first step's games are trained on; without one a step of them is played first. The
two sides take turns in one process: `one` trains an adapter on the turns of both agents, `two` an adapter per agent on
its own. Figures are medians of laps after one that does not count, in seconds of CPU time. Also told: how far the
gradients of each of the two are from those of a learner that has the model for itself.

Both agents are asked the same questions, so that a tree of both has fewer tokens than a tree of each: `unique_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import hardware

from strop.algorithms import make
from strop.config import load
from strop.learner.learner import Learner
from strop.learner.model import load_frozen
from strop.models.names import resolve
from strop.store import open_store
from strop.trajectory import Batch, Sample, assemble

AGENTS = ("left", "right")
BUDGET = 4096


def play_a_step(folder: Path) -> Path:
    settings = ("loop.steps=1", "loop.eval_splits=[]")
    command = [
        sys.executable,
        "-m",
        "strop.cli",
        "train",
        "--config",
        "recipes/duel/both.toml",
        "--folder",
        str(folder),
    ]
    subprocess.run([*command, *(f"--set={one}" for one in settings)], check=True, capture_output=True)
    return folder


async def read_samples(run: Path) -> list[Sample]:
    store = await open_store(run)
    try:
        first = (await store.steps())[0]
        return [Sample(await store.get(id), await store.turns(id)) for id in first.rollouts]
    finally:
        await store.close()


def make_learner(model: Path, base: Any) -> Learner:
    config = load(
        learner={"lora": {"rank": 16}, "token_budget": BUDGET, "device": "cpu"},
        algorithm={"rewards": {"score": 1.0}, "settings": {"baseline": "agent"}},
    )
    return Learner(model, config.learner, make(config.algorithm, config.learner, config.policy), steps=1, base=base)


def credit(learner: Learner, samples: list[Sample], agents: tuple[str, ...]) -> Batch:
    batch = assemble(samples, agents=agents, budget=BUDGET)
    learner.algorithm.assign_credit(batch)
    return batch


def find_gradients(learner: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    turns = torch.arange(len(batch.turns)).numpy()
    learner._gradients(batch, turns, 1)
    learner.optim.masters.take_gradients()
    found = {name: tensor.grad.clone() for name, tensor in learner.optim.weights().items() if tensor.grad is not None}
    learner._clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--laps", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        run = arguments.run or play_a_step(Path(spare) / "run")
        samples = asyncio.run(read_samples(run))
    model = resolve("strop/nano")
    base = load_frozen(model, load(learner={"device": "cpu"}).learner)
    both, *each = (make_learner(model, base) for _ in range(3))
    whole = credit(both, samples, AGENTS)
    parts = [credit(learner, samples, (agent,)) for learner, agent in zip(each, AGENTS, strict=True)]
    apart = 0.0
    for learner, batch in zip(each, parts, strict=True):
        ours, theirs = find_gradients(learner, batch), find_gradients(make_learner(model, None), batch)
        apart = max(apart, *(float((ours[name] - theirs[name]).abs().max()) for name in theirs))
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    unique: dict[str, float] = {}
    for _ in range(arguments.laps + 1):
        for side, work in {"one": [(both, whole)], "two": list(zip(each, parts, strict=True))}.items():
            began = time.process_time()
            told = [learner.update(batch) for learner, batch in work]
            seconds[side].append(time.process_time() - began)
            unique[side] = sum(metrics["tree/unique_tokens"] for metrics in told)
    medians = {side: statistics.median(laps[1:]) for side, laps in seconds.items()}
    found = {
        "turns": len(whole.turns),
        "tokens": sum(len(path) for path in whole.paths),
        "unique_tokens": unique,
        "seconds": medians,
        "ratio": medians["two"] / medians["one"],
        "gradients_apart": apart,
        "torch": torch.__version__,
        "hardware": hardware(),
    }
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
