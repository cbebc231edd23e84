"""Gradient norms of two agents whose rewards are compared by agent, and jointly.

    python benchmarks/normalisation.py [RUN] [--json FILE] [--train]

RUN is a run of recipes/duel/both.toml, whose first step's games are looked at; without one a step of them is played
first. For each of its two policies, adapters on one model, told is the norm of the gradient of its first update with
baseline = agent and baseline = joint:

    as rewarded   both agents' scores between 0 and 1
    right x 10    the scores of `right` on another scale, changed in memory
    right + 3     the scores of `right` shifted, changed in memory

Beside it: the mean advantage, and the cosine between the gradient and that of baseline = agent, as rewarded. `recorded`
is the norm that the run itself had in that step, with the baseline of its configuration. With `--train` the recipe is
also trained with either baseline, and the norms of all its steps are summed up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapters import AGENTS, BUDGET, find_gradients, make_learner, play_a_step, read_samples
from machine import hardware
from msgspec import structs

from strop.algorithms import make
from strop.config import load
from strop.learner.learner import Learner
from strop.models.names import resolve
from strop.store import open_store
from strop.trajectory import Sample, assemble
from strop.types import Step

BASELINES = ("agent", "joint")
CHANGES: dict[str, Callable[[float], float]] = {
    "as rewarded": lambda value: value,
    "right x 10": lambda value: 10 * value,
    "right + 3": lambda value: value + 3,
}


def change_scores(samples: list[Sample], change: Callable[[float], float]) -> list[Sample]:
    """The same games, in which `right` got other scores."""
    changed: list[Sample] = []
    for sample in samples:
        rewards = tuple(
            structs.replace(one, value=change(one.value)) if (one.name, one.agent) == ("score", "right") else one
            for one in sample.rollout.rewards
        )
        changed.append(Sample(structs.replace(sample.rollout, rewards=rewards), sample.turns))
    return changed


def find_gradient(learner: Learner, samples: list[Sample], agent: str, baseline: str) -> tuple[torch.Tensor, float]:
    """The gradient of an agent's first update as one vector, and its mean advantage."""
    config = load(algorithm={"rewards": {"score": 1.0}, "settings": {"baseline": baseline}})
    batch = assemble(samples, agents=(agent,), budget=BUDGET, policy=agent)
    metrics = make(config.algorithm, config.learner, config.policy).assign_credit(batch)
    found = find_gradients(learner, batch)
    return torch.cat([found[name].flatten() for name in sorted(found)]), metrics["critic/advantages/mean"]


def compare_baselines(learner: Learner, samples: list[Sample]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for agent in AGENTS:
        plain = find_gradient(learner, samples, agent, "agent")[0]
        for baseline in BASELINES:
            for change, how in CHANGES.items():
                gradient, advantage = find_gradient(learner, change_scores(samples, how), agent, baseline)
                cosine = torch.nn.functional.cosine_similarity(gradient, plain, dim=0)
                row = {"policy": agent, "baseline": baseline, "change": change, "grad_norm": float(gradient.norm())}
                rows.append(row | {"advantage_mean": advantage, "cosine": float(cosine)})
    return rows


async def read_steps(run: Path) -> list[Step]:
    store = await open_store(run)
    try:
        return await store.steps()
    finally:
        await store.close()


def train(folder: Path, baseline: str) -> Path:
    settings = (f"algorithm.settings.baseline={baseline}", "loop.eval_splits=[]")
    command = [sys.executable, "-m", "strop.cli", "train", "--config", "recipes/duel/both.toml", "--folder"]
    subprocess.run([*command, str(folder), *(f"--set={one}" for one in settings)], check=True, capture_output=True)
    return folder


def sum_up(steps: list[Step]) -> dict[str, Any]:
    """The norms of a run's steps by policy, and how many questions its agent answered in each."""
    told: dict[str, Any] = {"steps": len(steps)}
    for agent in AGENTS:
        norms = [step.metrics.get(f"policies/{agent}/actor/grad_norm", 0.0) for step in steps]
        points = [round(step.metrics[f"agents/{agent}/reward/points"], 3) for step in steps]
        told[agent] = {"mean": sum(norms) / len(norms), "max": max(norms), "norms": norms, "points": points}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--train", action="store_true", help="train the recipe with either baseline: about 15 minutes")
    arguments = parser.parse_args()
    before = hardware()
    with tempfile.TemporaryDirectory() as spare:
        run = arguments.run or play_a_step(Path(spare) / "run")
        samples, first = asyncio.run(read_samples(run)), asyncio.run(read_steps(run))[0]
        rows = compare_baselines(make_learner(resolve("strop/nano"), None), samples)
        trained = {
            baseline: sum_up(asyncio.run(read_steps(train(Path(spare) / baseline, baseline))))
            for baseline in (BASELINES if arguments.train else ())
        }
    print(f"{'policy':8}{'baseline':10}{'change':14}{'grad norm':>10}{'advantage':>11}{'cosine':>8}")
    for row in rows:
        print(
            f"{row['policy']:8}{row['baseline']:10}{row['change']:14}{row['grad_norm']:10.4f}"
            f"{row['advantage_mean']:11.3f}{row['cosine']:8.3f}"
        )
    for baseline, told in trained.items():
        for agent in AGENTS:
            mean, most = told[agent]["mean"], told[agent]["max"]
            print(f"{told['steps']} steps, {baseline}, {agent}: mean {mean:.4f}, max {most:.4f}")
    found = {
        "games": len(samples),
        "rows": rows,
        "recorded": {agent: first.metrics.get(f"policies/{agent}/actor/grad_norm") for agent in AGENTS},
        "trained": trained,
        "torch": torch.__version__,
        "hardware": before,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
