"""Whether recipes learn: their runs for one GPU, and the score on tasks not trained on, before and after.

    python benchmarks/learning.py calc sql search service [--data calc=FOLDER ...] [--set a.b=c] [--json FILE]

Each is `recipes/NAME/gpu.toml` as it stands, run one after another. Results are written after each, beside those of
recipes that the file has already, so that several of these may run at once; learning.png has a panel for every recipe.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.processes import ROOT, say

RESULTS = ROOT / "benchmarks" / "results"
Found = dict[str, Any]


def run(recipe: str, place: Path, data: str | None, sets: list[str], config: str) -> Found:
    """One recipe's run, as `make recipe` has it."""
    script, toml = ROOT / "recipes" / recipe / "train.py", ROOT / "recipes" / recipe / f"{config}.toml"
    command = [sys.executable, *([str(script)] if script.exists() else ["-m", "strop.cli", "train"])]
    command += ["--config", str(toml), "--folder", str(place / recipe), "--json", *(f"--set={one}" for one in sets)]
    done = subprocess.run(
        command + (["--data", data] if data else []), capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        logs = [(place / recipe / name) for name in ("learner.log", "agents.log", "vllm.log")]
        tails = [f"{log.name}:\n{log.read_text()[-1500:]}" for log in logs if log.exists()]
        raise SystemExit("\n".join([done.stderr[-4000:], *tails]))
    summary = json.loads(done.stdout.splitlines()[-1])
    lines = [json.loads(line) for line in (place / recipe / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "critic/rewards/mean" in line]
    return {
        "model": summary["model"],
        "config": config,
        "set": sets,
        "data": Path(data).name if data else None,
        "seconds": summary["seconds"],
        "before": summary["before"],
        "after": summary["after"],
        "scores": summary["scores"],
        "rewards": [step["critic/rewards/mean"] for step in steps],
        "seconds_per_step": [step.get("perf/time_per_step") for step in steps],
        "failed": summary["failed"],
        "max_logprob_diff": summary["max_logprob_diff"],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
    }


def hardware() -> Found:
    import torch

    found: Found = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def draw(found: Found, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3.4), squeeze=False, layout="constrained")
    for axis, (recipe, one) in zip(axes[0], found.items(), strict=True):
        axis.plot(range(1, len(one["rewards"]) + 1), one["rewards"], color="#9bb7d4", label="training reward")
        split, scores = next(iter(one["scores"].items()), ("", {}))
        for name, points in scores.items():
            look = {"color": "#1f4e79", "marker": "o"} if name == "reward" else {"marker": ".", "linestyle": ":"}
            axis.plot(*zip(*points, strict=True), **look, label=f"{split} {name}")
        axis.set(title=f"{recipe}, {one['model']}", xlabel="step", ylim=(0, None))
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(file, dpi=120)


def _pair(given: str) -> tuple[str, str]:
    recipe, _, path = given.partition("=")
    return recipe, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--config", default="gpu", help="which of the recipe's files (default: gpu)")
    parser.add_argument("--data", action="append", default=[], metavar="RECIPE=PATH", help="where its data is")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting, for all of them")
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", default=RESULTS / "learning.json")
    given = parser.parse_args()
    data = {recipe: os.path.abspath(path) if os.path.exists(path) else path for recipe, path in map(_pair, given.data)}
    with tempfile.TemporaryDirectory(prefix="strop-learning-") as scratch:
        for recipe in given.recipes:
            one = run(recipe, (given.folder or Path(scratch)).absolute(), data.get(recipe), given.set, given.config)
            with given.json.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                found: Found = json.loads(file.read() or "{}") | {recipe: one}
                file.truncate(0)
                file.write(json.dumps(found, indent=1) + "\n")
                draw(found, given.json.with_suffix(".png"))
            say(f"{recipe}: {one['before']} -> {one['after']}, {one['seconds']:.0f} s")


if __name__ == "__main__":
    main()
