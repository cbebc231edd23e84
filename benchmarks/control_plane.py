"""What stands between agents and many engines: the cost of a rollout while 100, 1,000 and 10,000 are in flight.

    python benchmarks/control_plane.py [--in-flight 100 1000 10000] [--replicas 64] [--rate 400] [--json FILE]

One gateway process with its SQLite store, and 64 simulated engine replicas behind it, each of which answers so many at
once and takes its time for every answer: as long as it takes for `--rate` requests a second to have that many in
flight. Rollouts are tool conversations of six requests (`gateway.py`), answers have 64 tokens with logprobs, and every
turn is in the store before its answer is sent. The rate is the same at all sizes, so that only how many wait differs.

    request CPU   of the gateway's process, store and simulated engines included, for each request
    rollout CPU   the same for what a rollout costs beside its requests: queued, leased, finished, forgotten
    added         how much longer than the engine an answer took: median and 99th percentile of answers less those of
                  the engine's times, which are drawn evenly from half to one and a half times the mean
    KB each       memory of the process, when all have ended, for each that was in flight at once
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import hardware
from peers.gateway_lap import Load
from peers.gateway_sides import Strop, started
from peers.processes import PEERS, ROOT, say
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
NANO = ROOT / "src" / "strop" / "models" / "nano"
Found = dict[str, Any]


def measure(folder: Path, in_flight: int, given: argparse.Namespace) -> Found:
    """So many conversations, all at once."""
    place, seconds = folder / str(in_flight), in_flight / given.rate
    place.mkdir()
    command = [sys.executable, PEERS / "gateway_strop.py", place, "NORMAL", given.model]
    command += ["--replicas", str(given.replicas), "--seconds", str(seconds)]
    with started(*command) as gateway, gateway.awake():
        Load(folder).run(gateway, min(in_flight, 200), min(in_flight, 200))
        before, idle = gateway.cpu(), gateway.memory()
        began = time.perf_counter()
        lap = Load(folder).run(gateway, in_flight, in_flight)
        whole = gateway.cpu() - before
        took = time.perf_counter() - began
    requests = lap["requests"]
    return {
        "requests": requests,
        "engine_seconds": seconds,
        "requests_per_second": requests / took,
        "request_cpu_ms": lap["cpu_ms"],
        "rollout_cpu_ms": (whole * 1000 - lap["cpu_ms"] * requests) / in_flight,
        "added_p50_ms": lap["p50_ms"] - 1.0 * seconds * 1000,
        "added_p99_ms": lap["p99_ms"] - 1.49 * seconds * 1000,
        "kb_each": (lap["rss_mb"] - idle) * 1024 / in_flight,
        "exact": Strop.extensions(place),
    }


def show(found: Found) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"{found['replicas']} replicas, one gateway process and its store", title_justify="left")
    columns = (
        "in flight",
        "requests/s",
        "request CPU ms",
        "rollout CPU ms",
        "added p50 ms",
        "p99 ms",
        "KB each",
        "inexact",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for name, side in found["sides"].items():
        table.add_row(
            f"{int(name):,}",
            f"{side['requests_per_second']:,.0f}",
            f"{side['request_cpu_ms']:.2f}",
            f"{side['rollout_cpu_ms']:.2f}",
            f"{side['added_p50_ms']:.1f}",
            f"{side['added_p99_ms']:.1f}",
            f"{side['kb_each']:.0f}",
            str(side["exact"]["branches"]),
        )
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second")
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--json", type=Path, default=RESULTS / "control_plane.json")
    given = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if max(given.in_flight) + 1000 > limit:
        raise SystemExit(
            f"{max(given.in_flight)} connections need as many open files, and {limit} are allowed: ulimit -n"
        )
    found: Found = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "python": platform.python_version(),
        "replicas": given.replicas,
        "rate": given.rate,
        "sides": {},
    }
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as folder:
        for in_flight in given.in_flight:
            say(f"{in_flight:,} in flight")
            found["sides"][str(in_flight)] = measure(Path(folder), in_flight, given)
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
