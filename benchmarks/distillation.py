"""How many steps a fresh model needs to a held-out score: by rewards, and by what a trained model says of its tokens.

    python benchmarks/distillation.py [--json FILE] [--tasks calc chain] [--seeds 3] [--folder runs/distillation]

For each of the demo's tasks a model in the box (strop/nano) is trained by GRPO as `strop demo` does it: the teacher.
Then, for every seed, two fresh ones are trained with the same small batches, learning rate and evaluations:

    grpo      from rewards
    distill   from the teacher's logprobs of what the student sampled; rewards are measured and not used

Told is the first evaluation of the held-out tasks (split test, sampled at temperature 1) with a reward of 0.90 or more,
and how many rollouts were trained on by then. With `--self` calc is also learnt from the model itself, that is told to
use its calculator in a system message which only it as the teacher sees. Runs that are in --folder already are read,
not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import hardware

import strop

GOAL = 0.90
STEPS = {"calc": 24, "chain": 45}
BATCH = {"loop.groups": 4, "loop.group_size": 4, "loop.eval_greedy": False}
"""16 rollouts to a step, for both."""
EVERY = {"calc": 2, "chain": 3}
"""Steps between evaluations of the held-out tasks."""
RATE = {"learner.optim.lr": 3e-4, "learner.optim.warmup": 3, "learner.optim.schedule": "constant"}
HINT = "Use the calculator."
TEACHER_SEED = 100


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
    first = next((step for step, score in scores if score >= GOAL), None)
    rollouts = None if first is None else first * BATCH["loop.groups"] * BATCH["loop.group_size"]
    told = {"steps_to_goal": first, "rollouts_to_goal": rollouts, "best": max(score for _, score in scores)}
    told |= {"last": scores[-1][1], "seconds": summary["seconds"], "scores": scores}
    kl = read_metric(folder, "distill/kl/mean")
    return told | ({"kl_first": kl[0], "kl_last": kl[-1]} if kl else {})


def compare(place: Path, task: str, seeds: int, *, with_self: bool) -> dict[str, Any]:
    teacher = run_demo(place / f"{task}-teacher", task, TEACHER_SEED, {"loop.eval_greedy": False})
    distill = {"algorithm.name": "distill", "algorithm.settings": {}}
    ways: dict[str, dict[str, Any]] = {
        "grpo": {},
        "distill": distill | {"algorithm.settings.teacher": str(place / f"{task}-teacher")},
    }
    if with_self and task == "calc":
        ways["self"] = distill | {"algorithm.settings.teacher": "self", "algorithm.settings.teacher_prompt": HINT}
    found: dict[str, Any] = {"teacher": {"score": teacher["end"], "steps": teacher["steps"]}}
    for way, settings in ways.items():
        found[way] = []
        for seed in range(seeds):
            folder = place / f"{task}-{way}-{seed}"
            summary = run_demo(
                folder,
                task,
                seed,
                {"loop.steps": STEPS[task], "loop.eval_every": EVERY[task]} | BATCH | RATE | settings,
            )
            found[way].append(told := {"seed": seed} | describe(folder, summary))
            print(
                f"{task:6} {way:8} seed {seed}: {GOAL:.2f} after step {told['steps_to_goal']}, "
                f"best {told['best']:.3f}, last {told['last']:.3f}, {told['seconds']:.0f} s",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tasks", nargs="+", default=["chain", "calc"], choices=["calc", "chain"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--self", action="store_true", help="learn calc from the model itself, with a better prompt")
    arguments = parser.parse_args()
    before = hardware()
    place, seeds, with_self = arguments.folder, arguments.seeds, arguments.self
    found = {task: compare(place, task, seeds, with_self=with_self) for task in arguments.tasks}
    versions = {"strop": strop.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    told = {"goal": GOAL, "batch": BATCH, "rate": RATE, **found, "versions": versions, "hardware": before}
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
