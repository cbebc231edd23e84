"""Kills at random: runs on a local Ray cluster whose processes, nodes and commands die again and again.

    python benchmarks/chaos.py [--kills 50] [--runs 5] [--seed 0] [--json FILE]

Each run is the demo on two nodes of a cluster of three: two learner ranks (FSDP2 over gloo), each of which serves the
model, two gateway workers, two runner pools, and a store in PostgreSQL. Every few seconds something is killed with
SIGKILL: a rank's process or the Ray actor above it, a runner pool's or the actor above it, a process that runs agents,
a gateway worker, a whole node (another one joins), or the command itself, which is started again with `--resume`.
A run counts if it ends, every rollout of its steps was trained on once and has its turns, nothing is left running, and
the model has learned what it learns undisturbed.

Needs Ray (`make cluster`) and PostgreSQL (`make postgres`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import hardware
from peers.processes import ROOT, say

sys.path.insert(0, str(ROOT))
from tests import runs
from tests.integration.cluster.nodes import TWO_RANKS, ClusterRun, Nodes, find_processes, list_groups
from tests.postgres import Server

RESULTS = ROOT / "benchmarks" / "results"
STEPS, GROUPS = 16, 4
LEAST = 0.7
"""What held-out tasks come to at the end; the model begins at about .27."""
EVERY = 3.0, 15.0
LIMIT = 1500.0
Kill = Callable[[], bool]


class Victims:
    """What may be killed of a run. Each kind returns whether it found somebody."""

    def __init__(self, nodes: Nodes, run: ClusterRun, draw: random.Random) -> None:
        self.nodes, self.run, self.draw = nodes, run, draw
        self.kinds: dict[str, Kill] = {
            "rank": lambda: self.of_journal("rank", "pid"),
            "rank's actor": lambda: self.of_journal("rank", "host"),
            "runner pool": lambda: self.of_journal("runner pool", "pid"),
            "runner pool's actor": lambda: self.of_journal("runner pool", "host"),
            "agents' process": lambda: self.of_processes("strop.runners.worker"),
            "gateway worker": lambda: self.of_processes("strop.gateway.worker"),
            "node": self.node,
            "command": self.command,
        }

    def of_journal(self, what: str, which: str) -> bool:
        newest = {one["what"]: one for one in self.run.events("started", what)}
        return bool(newest) and end(self.draw.choice([one[which] for one in newest.values()]))

    def of_processes(self, module: str) -> bool:
        found: list[int] = []
        for pid in find_processes(self.run.folder):
            with suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return bool(found) and end(self.draw.choice(found))

    def node(self) -> bool:
        node = self.nodes.added.pop(self.draw.randrange(len(self.nodes.added)))
        self.nodes.remove(node)
        time.sleep(self.draw.uniform(0, 3))
        self.nodes.added.append(self.nodes.add(3))
        return True

    def command(self) -> bool:
        self.run.process.kill()
        self.run.process.communicate()
        begun = (self.run.folder / "config.json").exists()
        words = ["train", "--resume", self.run.folder] if begun else None
        if words is None:  # nothing to resume: the same command again
            shutil.rmtree(self.run.folder, ignore_errors=True)
        command = runs.strop(*words) if words is not None else list(self.run.process.args)  # pyright: ignore
        self.run.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return True


def end(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def disturb(folder: Path, url: str, kills: int, draw: random.Random) -> dict[str, Any]:
    """One run with so many kills."""
    nodes, began = Nodes(3, 3, 3), time.monotonic()
    settings = [*TWO_RANKS, f"loop.steps={STEPS}", f"loop.groups={GROUPS}", "cluster.restarts=1000"]
    settings += ["gateway.workers=2", "loop.eval_splits=['test']", f"store.url={url}", "cluster.timeout=120"]
    run = ClusterRun(folder, nodes.address, *settings)
    killed: Counter[str] = Counter()
    try:
        victims = Victims(nodes, run, draw)
        while killed.total() < kills and run.process.poll() is None:
            time.sleep(draw.uniform(*EVERY))
            kind = draw.choice(sorted(victims.kinds))
            if run.process.poll() is None and victims.kinds[kind]():
                killed[kind] += 1
                say(f"  {time.monotonic() - began:5.0f} s: {kind}")
        said = run.finish(timeout=LIMIT)
        told = run.check(steps=STEPS, url=url)
        deadline = time.monotonic() + 30
        while (left := find_processes(folder) or list_groups(nodes.address)) and time.monotonic() < deadline:
            time.sleep(0.5)
        summary = json.loads((folder / "summary.json").read_text())
        return {
            "killed": dict(killed),
            "seconds": time.monotonic() - began,
            "lineages": told.steps[-1].lineage,
            "rollouts": len(told.rollouts),
            "attempts": sum(rollout.attempts for rollout in told.rollouts),
            "score": summary["end"],
            "left": [str(one) for one in left],
            "ended": "done" in said or summary["done"],
        }
    finally:
        run.end()
        nodes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS / "chaos.json")
    given = parser.parse_args()
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware()}
    found |= {"python": platform.python_version(), "seed": given.seed, "runs": []}
    server = Server()
    (ROOT / "runs").mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as scratch:
            for number in range(given.runs):
                share = given.kills // given.runs + (number < given.kills % given.runs)
                say(f"run {number + 1} of {given.runs}, {share} kills")
                draw = random.Random(given.seed + number)
                one = disturb(Path(scratch) / str(number), server.url(f"chaos{number}"), share, draw)
                found["runs"].append(one)
                say(f"  {one}")
                found["kills"] = sum(sum(each["killed"].values()) for each in found["runs"])
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        server.close()
    bad = [one for one in found["runs"] if one["left"] or one["score"] < LEAST or not one["ended"]]
    say(f"{found['kills']} kills in {len(found['runs'])} runs, {len(bad)} of which did not come out as they should")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
