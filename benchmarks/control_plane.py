"""What stands between agents and many engines: what a rollout costs while 100, 1,000 and 10,000 are in flight.

    python benchmarks/control_plane.py [--part gateway|store|served|run|all] [--in-flight 100 1000 10000]
                                       [--replicas 64] [--rate 400] [--json FILE]

    gateway    tool conversations of six requests (`gateway.py`) through a served gateway with its store, before so many
               simulated engine replicas. Each takes as long for an answer as has so many in flight at so many requests
               a second, so the rate is the same at all sizes and only how many wait differs. One process; two workers;
               one process again when 50,000 rollouts have ended in its store; and tokens that workers are given by the
               owner, an answer in 1 and in 64 chunks
    store      the store's verbs with so many rollouts running and 100,000 that ended, on SQLite and on PostgreSQL
    served     the store over HTTP, as runner pools ask it: leases, heartbeats, results
    run        what the run's own process does: which replica answers, waiting for the step's rollouts, the batch that
               every learner rank is sent

CPU time is what counts: it is the same whatever else the machine does, but for caches, which is why each figure has
the time of some fixed work beside it (`reference_ms`). Rates and latencies are those of the machine as it was.

Left out: agents' own work, real engines (`gateway_vllm.py`), a network between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import control_plane_gateway
import control_plane_run
import control_plane_store
from machine import hardware, measure_reference
from peers.processes import ROOT
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
Found = dict[str, Any]


def measure(part: str, folder: Path, given: argparse.Namespace) -> Found:
    parts: dict[str, Callable[[], Found]] = {
        "gateway": lambda: control_plane_gateway.run(folder, given.in_flight, given.rate, given.replicas),
        "store": lambda: control_plane_store.run(folder, given.in_flight, given.ended),
        "served": lambda: control_plane_store.run_served(folder, given.in_flight),
        "run": lambda: control_plane_run.run(folder, given.in_flight),
    }
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware()}
    versions = {"strop": version("strop"), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    about |= {"versions": versions, "reference_ms": measure_reference()}
    began = time.monotonic()
    found = parts[part]()
    return {**about, "load_after": os.getloadavg(), "seconds": time.monotonic() - began, **found}


def show(found: Found) -> None:
    """Every side of every part, its figures of three digits."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for part, measured in found.items():
        for title, sides in measured.items():
            if not isinstance(sides, dict) or not all(isinstance(side, dict) for side in sides.values()):
                continue
            names = list(dict.fromkeys(name for side in sides.values() for name in side))
            table = Table(title=f"{part}: {title}", title_justify="left")
            for column in ("", *names):
                table.add_column(column.replace("_", " "), justify="right" if column else "left")
            for name, side in sides.items():
                table.add_row(name, *(_cell(side.get(column)) for column in names))
            out.print(table)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["gateway", "store", "served", "run"]
    parser.add_argument("--part", choices=[*names, "all"], default="all")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--ended", type=int, default=100_000, help="rollouts that have ended in the store")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second")
    parser.add_argument("--json", type=Path, default=RESULTS / "control_plane.json")
    given = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if max(given.in_flight) + 1000 > limit:
        raise SystemExit(
            f"{max(given.in_flight)} connections need as many open files, and {limit} are allowed: ulimit -n"
        )
    found: Found = json.loads(given.json.read_text()) if given.json.is_file() else {}
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    for part in names if given.part == "all" else [given.part]:
        with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as folder:
            found[part] = measure(part, Path(folder), given)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
