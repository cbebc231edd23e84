"""Does a long run stay as it was? Thousands of steps of the demo, watched from the outside.

    python benchmarks/long_run.py [--steps 2000] [--json FILE]

Steps are as small as they come (two rollouts of one group), so that what is done per step, not the model, is what may
grow. Every second the memory and the open files of all processes of the run are looked at.

    memory   MiB of all processes together, each page that several share counted once (Pss)
    files    open file descriptors of all processes together
    step     median seconds

told for each fifth of the run; the first is left out of what is compared, since caches fill in it.
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

from peers.processes import ROOT, say
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
EVERY = 1.0
"""Seconds between two looks."""
PARTS = 5
Found = dict[str, Any]


def family(pid: int) -> list[int]:
    """A process and all that came of it."""
    parents = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, frontier = [pid], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def look(pid: int) -> tuple[float, int]:
    """MiB and open files of a process's family."""
    memory, files = 0.0, 0
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
            memory += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
            files += len(os.listdir(f"/proc/{member}/fd"))
        except (OSError, StopIteration):
            continue  # it has just ended
    return memory, files


def watch(folder: Path, steps: int) -> list[Found]:
    """Run it; what was seen at each look, and which step had been made by then."""
    settings = [
        *(
            f"loop.steps={steps}",
            "loop.groups=1",
            "loop.group_size=2",
            "loop.eval_splits=[]",
            "loop.checkpoint_every=50",
        ),
        *("runner.workers=2", "runner.agents_in=threads", "engine.deterministic=false"),
    ]
    command = [sys.executable, "-m", "strop.cli", "demo", "--folder", str(folder), "--json"]
    process = subprocess.Popen(
        [*command, *(f"--set={s}" for s in settings)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    seen, metrics, told = list[Found](), folder / "metrics.jsonl", 0
    while process.poll() is None:
        time.sleep(EVERY)
        made = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        memory, files = look(process.pid)
        seen.append({"step": made, "memory_mib": memory, "files": files})
        if made // 200 > told:
            told = made // 200
            say(f"step {made}: {memory:.0f} MiB, {files} files")
    if process.returncode:
        raise SystemExit(process.stderr.read() if process.stderr else "")
    return seen


def parts(seen: list[Found], seconds: list[float]) -> list[Found]:
    found = list[Found]()
    size = len(seconds) // PARTS
    for n in range(PARTS):
        here = [look for look in seen if n * size < look["step"] <= (n + 1) * size and look["files"]]
        found.append(
            {
                "steps": [n * size + 1, (n + 1) * size],
                "memory_mib": statistics.median(look["memory_mib"] for look in here),
                "files": statistics.median(look["files"] for look in here),
                "step_seconds": statistics.median(seconds[n * size : (n + 1) * size]),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="FILE", default=RESULTS / "long_run.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strop-long-") as place:
        folder = Path(place) / "run"
        seen = watch(folder, given.steps)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["timing_s/step"] for line in lines if "timing_s/step" in line]
        store = sum(file.stat().st_size for file in folder.glob("store*"))
    told = parts(seen, seconds)
    second, last = told[1], told[-1]
    growth = {name: last[name] / second[name] for name in ("memory_mib", "files", "step_seconds")}
    found: Found = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine(), "load_before": os.getloadavg()},
        "steps": len(seconds),
        "parts": told,
        "last_by_second": growth,
        "store_bytes_per_step": store / len(seconds),
    }
    table = Table(title=f"{len(seconds)} steps", title_justify="left")
    for column in ("steps", "MiB", "files", "s/step"):
        table.add_column(column, justify="right")
    for part in told:
        first, stop = part["steps"]
        cells = (f"{part['memory_mib']:.0f}", f"{part['files']:.0f}", f"{part['step_seconds']:.3f}")
        table.add_row(f"{first} to {stop}", *cells)
    Console(highlight=False).print(table)
    print("the last fifth by the second: " + ", ".join(f"{name} {ratio:.3f}x" for name, ratio in growth.items()))
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
