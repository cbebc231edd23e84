"""How many steps a fresh model needs to a held-out score: by rewards, and by what a trained model says of its tokens.

    python benchmarks/distillation.py [--json FILE] [--cases chain chain-4 calc] [--seeds 3] [--folder RUNS]

For each of the demo's tasks a model in the box (strop/nano) is trained by GRPO as `strop demo` does it: the teacher.
Then, for every seed, two fresh ones are trained with the same small batches, learning rate and evaluations:

    grpo      from rewards
    distill   from the teacher's logprobs of what the student sampled; rewards are measured and not used

chain and calc make one optimizer step of each batch, chain-4 makes four. Told is the first evaluation of the held-out
tasks (split test, sampled at temperature 1) with a reward of 0.5, 0.8 and 0.9 or more; None where a run never gets
there. With `--self` calc is also learnt from the untrained model, which is told to use its calculator in a system
message that only the teacher sees: as it was at the beginning (prompted), and as it is in each step (self). Runs that
are in --folder already are read, not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import hardware

import strop

GOALS = (0.5, 0.8, 0.9)
BATCH = {"loop.groups": 4, "loop.group_size": 4, "loop.eval_greedy": False}
"""16 rollouts to a step, for both."""
RATE = {"learner.optim.lr": 3e-4, "learner.optim.warmup": 3, "learner.optim.schedule": "constant"}
HINT = "Use the calculator."
TEACHER_SEED = 100


@dataclass(frozen=True)
class Case:
    """A task of the demo; steps to train, steps between evaluations, and optimizer steps of each batch."""

    task: str
    steps: int
    every: int
    minibatches: int = 1

    def settings(self) -> dict[str, Any]:
        own = {"loop.steps": self.steps, "loop.eval_every": self.every, "learner.minibatches": self.minibatches}
        return own | BATCH | RATE


CASES = {"chain": Case("chain", 45, 3), "chain-4": Case("chain", 24, 2, minibatches=4), "calc": Case("calc", 24, 2)}


def run_demo(folder: Path, task: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run as `strop demo` makes it."""
    if not (folder / "summary.json").is_file():
        given = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        command = [sys.executable, "-m", "strop.cli", "demo", "--task", task, "--seed", str(seed), "--json"]
        subprocess.run([*command, "--folder", str(folder), *given], check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "summary.json").read_text())


def read_metric(folder: Path, name: str) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def describe(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """How soon a run got where it should."""
    scores = summary["scores"]["test"]["reward"]
    first = {str(goal): next((step for step, score in scores if score >= goal), None) for goal in GOALS}
    told = {"steps_to": first, "best": max(score for _, score in scores), "last": scores[-1][1]}
    told |= {"seconds": summary["seconds"], "scores": scores}
    kl = read_metric(folder, "distill/kl/mean")
    return told | ({"kl_first": kl[0], "kl_last": kl[-1]} if kl else {})


def compare(place: Path, name: str, seeds: int, *, with_self: bool) -> dict[str, Any]:
    case = CASES[name]
    teacher = place / f"{case.task}-teacher"
    trained = run_demo(teacher, case.task, TEACHER_SEED, {"loop.eval_greedy": False})
    distill = {"algorithm.name": "distill", "algorithm.settings": {}}
    ways: dict[str, dict[str, Any]] = {"grpo": {}, "distill": distill | {"algorithm.settings.teacher": str(teacher)}}
    if with_self and name == "calc":
        for way, teacher_name in (("prompted", "strop/nano"), ("self", "self")):
            own = {"algorithm.settings.teacher": teacher_name, "algorithm.settings.teacher_prompt": HINT}
            ways[way] = distill | own
    found: dict[str, Any] = asdict(case) | {"teacher": {"score": trained["end"], "steps": trained["steps"]}}
    for way, settings in ways.items():
        found[way] = []
        for seed in range(seeds):
            folder = place / f"{name}-{way}-{seed}"
            summary = run_demo(folder, case.task, seed, case.settings() | settings)
            found[way].append(told := {"seed": seed} | describe(folder, summary))
            steps = ", ".join(f"{goal} after step {step}" for goal, step in told["steps_to"].items())
            print(f"{name:8}{way:8} seed {seed}: {steps}; best {told['best']:.3f}, last {told['last']:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--self", action="store_true", help="learn calc from the model itself, with a better prompt")
    arguments = parser.parse_args()
    before = hardware()
    place, seeds, with_self = arguments.folder, arguments.seeds, arguments.self
    found = {name: compare(place, name, seeds, with_self=with_self) for name in arguments.cases}
    versions = {"strop": strop.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    told = {"batch": BATCH, "rate": RATE, **found, "versions": versions, "hardware": before}
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
