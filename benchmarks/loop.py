"""Rollouts that wait for the learner beside rollouts that do not: steps per second where tools are slow.

    python benchmarks/loop.py [--quick] [--staleness N] [--seeds 0 1 2] [--json FILE]

The task is the demo's, with the model in the box, and a tool that takes 0.1 to 5 seconds with a long tail
(peers/slow_tool.py). Both sides are whole runs of `strop train` with the same settings and seeds, one after the other;
only loop.staleness differs. Timed is what steps took, neither the start nor evaluations.

    steps/s        steps by the seconds they took
    learner busy   share of those in which the learner scored, updated or saved
    reward         on tasks that were not trained on, before and after

Compare ratios, not runs: with few cores, agents, engine and learner share them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.processes import PEERS, ROOT, say
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
Found = dict[str, Any]


def run(folder: Path, staleness: int, seed: int, steps: int) -> Found:
    settings = [
        *(f"loop.staleness={staleness}", f"loop.steps={steps}", "engine.deterministic=false"),
        *("loop.groups=8", "loop.group_size=8", "loop.eval_splits=['test']", "loop.eval_greedy=false"),
        *("runner.workers=64", "runner.agents_in=threads", f"agent={PEERS / 'slow_tool.py'}:agent"),
    ]
    command = [sys.executable, "-m", "strop.cli", "demo", "--folder", str(folder), "--seed", str(seed), "--json"]
    done = subprocess.run([*command, *(f"--set={s}" for s in settings)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    summary = json.loads(done.stdout)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    took = [line for line in lines if "timing_s/step" in line]
    seconds = sum(line["timing_s/step"] for line in took)
    return {
        "seconds": seconds,
        "steps_per_second": len(took) / seconds,
        "learner_busy": sum(line["perf/learner_busy"] * line["timing_s/step"] for line in took) / seconds,
        "start": summary["start"],
        "end": summary["end"],
        "staleness_mean": statistics.mean(line.get("training/off_policy/staleness/mean", 0.0) for line in took),
        "staleness_max": max(line.get("training/off_policy/staleness/max", 0.0) for line in took),
        "failed": summary["failed"],
        "max_logprob_diff": summary["max_logprob_diff"],
    }


def show(found: Found) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{found['steps']} steps of 64 rollouts, tools of 0.1 to 5 s", title_justify="left")
    for column in ("", "seed", "steps/s", "learner busy", "reward before", "after", "staleness"):
        table.add_column(column, justify="right" if column else "left")
    for name, laps in found["sides"].items():
        for seed, lap in zip(found["seeds"], laps, strict=True):
            table.add_row(
                name,
                str(seed),
                f"{lap['steps_per_second']:.3f}",
                f"{lap['learner_busy']:.0%}",
                *(f"{lap[key]:.3f}" for key in ("start", "end")),
                f"{lap['staleness_mean']:.2f}, at most {lap['staleness_max']:.0f}",
            )
    out.print(table)
    rewards = found["reward_after"]
    out.print(
        f"overlapping is {found['ratio']:.2f}x as fast (median over seeds); reward after training {rewards[0]:.3f} "
        f"waiting, {rewards[1]:.3f} overlapping"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/loop.json")
    arguments = parser.parse_args()
    steps, seeds = (3, [0]) if arguments.quick else (arguments.steps, arguments.seeds)
    sides: dict[str, list[Found]] = {"waiting": [], "overlapping": []}
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="strop-loop-") as place:
        for number, seed in enumerate(seeds):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                lag = arguments.staleness if name == "overlapping" else 0
                lap = run(Path(place) / f"{name}-{seed}", lag, seed, steps)
                sides[name].append(lap)
                say(f"seed {seed}, {name}: {lap['steps_per_second']:.3f} steps/s, reward {lap['end']:.3f}")
    pairs = list(zip(sides["waiting"], sides["overlapping"], strict=True))
    found: Found = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine(), "load_before": before},
        "python": platform.python_version(),
        "steps": steps,
        "staleness": arguments.staleness,
        "seeds": seeds,
        "sides": sides,
        "ratio": statistics.median(other["steps_per_second"] / one["steps_per_second"] for one, other in pairs),
        "reward_after": [statistics.mean(lap["end"] for lap in laps) for laps in sides.values()],
    }
    show(found)
    results = arguments.json or (None if arguments.quick else RESULTS / "loop.json")
    if results is not None:
        results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
