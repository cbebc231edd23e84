"""Whether this code and another checkout's train the same: the demo and recipes, seed by seed, digest by digest.

    python benchmarks/same_results.py --against ../other/checkout [demo calc langgraph-react template] [--json FILE]

Both sides train with their own files and the deterministic engine. A step's digest is a hash of the weights it made, so
equal digests mean that every token, advantage and gradient before it was the same. Recipes need their environments
(`make recipes`), which both sides share. Ends with 1 if a digest or a score differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCORES = ("start", "end", "start_greedy", "end_greedy")


def train(checkout: Path, name: str, folder: Path) -> dict[str, Any]:
    """The digests and scores of one run of a checkout's code."""
    if name == "demo":
        arguments = ["demo", "--seed", "0"]
    else:
        arguments = ["train", "--config", f"recipes/{name}/laptop.toml", "--set", "engine.deterministic=true"]
        mine, theirs = ROOT / ".recipes", checkout / ".recipes"
        if not theirs.exists():
            theirs.symlink_to(mine)
    command = [sys.executable, "-m", "strop.cli", *arguments, "--folder", str(folder), "--json"]
    env = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{checkout}: {name} failed\n{done.stderr[-2000:]}")
    with sqlite3.connect(folder / "store.sqlite") as store:
        digests = store.execute("SELECT digest FROM steps WHERE superseded = 0 ORDER BY number").fetchall()
    summary = json.loads((folder / "summary.json").read_text())
    return {"digests": [digest for (digest,) in digests]} | {score: summary[score] for score in SCORES}


def compare(name: str, other: Path, folder: Path) -> dict[str, Any]:
    ours = train(ROOT, name, folder / f"{name}-this")
    theirs = train(other, name, folder / f"{name}-other")
    pairs = list(zip(ours["digests"], theirs["digests"], strict=False))
    return {
        "this": ours,
        "other": theirs,
        "same_digests": sum(a == b and a is not None for a, b in pairs),
        "steps": max(len(ours["digests"]), len(theirs["digests"])),
        "same_scores": all(ours[score] == theirs[score] for score in SCORES),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["demo", "calc", "langgraph-react", "template"])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", required=True)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="same-") as folder:
        for name in arguments.names:
            found[name] = one = compare(name, arguments.against.resolve(), Path(folder))
            told = ", ".join(f"{score} {one['this'][score]} and {one['other'][score]}" for score in SCORES)
            print(f"{name}: {one['same_digests']} of {one['steps']} digests are the same; {told}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    same = all(one["same_scores"] and one["same_digests"] == one["steps"] for one in found.values())
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
