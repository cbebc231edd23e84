"""Whether imitation helps: the model in the box, taught its own best rollouts, and what reinforcement learning still
takes after that.

    python benchmarks/imitation.py [--seeds 6] [--steps 16] [--folder PLACE] [--json FILE]

For every seed, all on the demo's calc tasks (recipes/nano/laptop.toml), scored on held-out tasks (split test, sampled):

    data      one step of a run with the untouched model: 128 rollouts, of which those with reward 1 are kept
    sft       a fresh model imitates them
    rl        reinforcement learning alone, 32 rollouts a step, evaluated after every step
    sft + rl  the same settings and seed, from the weights that imitation left

Told is how many training rollouts each takes until an evaluation first reaches 0.90; those that made the data are
counted too. Intervals are 95 % over seeds (Student's t), and of the difference by pairs of one seed. A run that never
reaches 0.90 counts as all the rollouts that it was given, and is named.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import hardware
from peers.processes import ROOT, say

CONFIG = ROOT / "recipes" / "nano" / "laptop.toml"
GOAL, GROUPS, SIZE = 0.90, 4, 8
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % of Student's t, by the number of seeds."""
Found = dict[str, Any]


def strop(*arguments: object) -> str:
    command = [sys.executable, "-m", "strop.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def train(folder: Path, seed: int, *sets: str, model: str = "strop/nano", config: Path = CONFIG) -> Found:
    given = [f"--set={one}" for one in ("loop.eval_greedy=false", *sets)]
    out = strop(
        "train", "--config", config, "--folder", folder, "--seed", seed, "--model", model, "--json", *given
    )  # fmt: skip
    return json.loads(out.splitlines()[-1])


def leave_out_algorithm(path: Path) -> Path:
    """The recipe's settings without those of its algorithm, which imitation does not have."""
    before, _, after = CONFIG.read_text().partition("[algorithm.settings]")
    path.write_text(before + after[after.index("[") :])
    return path


def run_seed(place: Path, seed: int, steps: int) -> Found:
    """Everything of one seed."""
    data = train(place / "data", 100 + seed, "loop.steps=1", "loop.eval_splits=[]", "loop.group_size=8")
    taught = train(
        place / "sft",
        seed,
        *("algorithm.name=sft", f"algorithm.settings.runs={place / 'data'}", "algorithm.settings.min_reward=1.0"),
        *("algorithm.settings.epochs=8", "algorithm.settings.batch_size=16"),
        *("learner.optim.decay=100", "loop.steps=0", "loop.eval_every=0"),
        config=leave_out_algorithm(place / "imitation.toml"),
    )
    model = place / "taught"
    strop("export", place / "sft", model)
    loop = [f"loop.steps={steps}", f"loop.groups={GROUPS}", f"loop.group_size={SIZE}", "loop.eval_every=1"]
    rate = f"learner.optim.decay={2 * steps}"
    alone = train(place / "rl", seed, *loop, rate)
    after = train(place / "sft-rl", seed, *loop, rate, model=str(model))
    samples = [json.loads(line) for line in (place / "sft" / "data.jsonl").read_text().splitlines()[1:]]
    return {
        "seed": seed,
        "data": {"rollouts": 128, "kept": len(samples), "seconds": data["seconds"]},
        "sft": {
            "before": taught["before"]["test"]["reward"],
            "after": taught["after"]["test"]["reward"],
            "steps": taught["steps"],
            "seconds": taught["seconds"],
        },
        "rl": describe(alone, steps),
        "sft_rl": describe(after, steps),
    }


def describe(summary: Found, steps: int) -> Found:
    points = summary["scores"]["test"]["reward"]
    first = next((step for step, score in points if score >= GOAL), None)
    return {
        "rollouts_to_goal": GROUPS * SIZE * (steps if first is None else first),
        "reached": first is not None,
        "scores": [score for _, score in points],
        "end": points[-1][1],
        "seconds": summary["seconds"],
    }


def interval(values: list[float]) -> Found:
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) in STUDENT else None
    return {"mean": fmean(values), "half_width_95": half, "values": values}


def summarise(rows: list[Found]) -> Found:
    alone = [row["rl"]["rollouts_to_goal"] for row in rows]
    after = [row["sft_rl"]["rollouts_to_goal"] for row in rows]
    return {
        "held_out_before_sft": interval([row["sft"]["before"] for row in rows]),
        "held_out_after_sft": interval([row["sft"]["after"] for row in rows]),
        "rollouts_to_0.90_rl": interval(alone),
        "rollouts_to_0.90_after_sft": interval(after),
        "rollouts_saved": interval([one - other for one, other in zip(alone, after, strict=True)]),
        "rollouts_to_0.90_after_sft_with_data": interval(
            [row["data"]["rollouts"] + row["sft_rl"]["rollouts_to_goal"] for row in rows]
        ),
        "never_reached": [
            f"{kind}, seed {row['seed']}" for row in rows for kind in ("rl", "sft_rl") if not row[kind]["reached"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=16, help="steps of reinforcement learning")
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", default=ROOT / "benchmarks" / "results" / "imitation.json")
    given = parser.parse_args()
    rows: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="strop-imitation-") as scratch:
        machine = hardware()
        for seed in range(given.seeds):
            rows.append(run_seed((given.folder or Path(scratch)).absolute() / str(seed), seed, given.steps))
            say(json.dumps({name: rows[-1][name] for name in ("seed", "data", "sft")}))
            say(f"rollouts to {GOAL}: {rows[-1]['rl']['rollouts_to_goal']} -> {rows[-1]['sft_rl']['rollouts_to_goal']}")
    found = {
        "goal": GOAL,
        "rollouts_per_step": GROUPS * SIZE,
        "steps": given.steps,
        "summary": summarise(rows) if len(rows) > 1 else None,
        "seeds": rows,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "hardware": machine,
    }
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
