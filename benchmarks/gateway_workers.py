"""Gateway workers: requests per second with 1, 2, 4, 8 processes before one store, and what each process costs.

    python benchmarks/gateway_workers.py [--workers 1 2 4 8] [--relayed 2 4 8] [--concurrent 64 256] [--seconds 3]
                                         [--laps 3] [--json FILE]

The load and the conversations are those of `gateway.py`: tool conversations of 2 to 12 messages whose answers (64
tokens with logprobs) come back as they were given. The engine answers at once: of its own in each worker, or `relayed`,
one for all in the process that owns the store, as the engines of a run are. Every turn is in SQLite before its answer
is sent.

A connection is used for one conversation after the other, so that it moves between workers each time. Linear is so many
times the rate of one worker under the same load; on a machine with fewer cores than processes only the CPU time per
request means anything. With few conversations at a time some workers have none now and then, since a hash places them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import hardware
from peers.gateway_lap import TURNS, Load
from peers.gateway_sides import Strop, started
from peers.processes import PEERS, ROOT, say
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
NANO = ROOT / "src" / "strop" / "models" / "nano"


def read_cpu(pid: int) -> float:
    """Seconds of CPU so far, of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def measure(
    folder: Path, num_workers: int, relayed: bool, concurrent: int, given: argparse.Namespace
) -> dict[str, Any]:
    place = folder / f"workers-{num_workers}-{relayed}-{concurrent}"
    place.mkdir()
    options = [str(num_workers), *(["relayed"] if relayed else [])]
    load, laps = Load(folder), list[dict[str, float]]()
    command = [sys.executable, PEERS / "gateway_strop.py", place, "NORMAL", given.model, *options]
    with started(*command) as gateway, gateway.awake():
        rate = load.run(gateway, 400, 16, seconds=1.0)["rate"]
        for _ in range(given.laps):
            workers = list_children(gateway.pid)
            before = gateway.cpu(), sum(map(read_cpu, workers))
            lap = load.run(
                gateway,
                int(rate * given.seconds * 3 / TURNS) + 2 * concurrent,
                concurrent,
                seconds=given.seconds,
            )
            owner, others = gateway.cpu() - before[0], sum(map(read_cpu, workers)) - before[1]
            per = 1000 / max(1, lap["requests"])
            laps.append({**lap, "owner_cpu_ms": owner * per, "worker_cpu_ms": others * per})
            rate = max(rate, lap["rate"])
    exact = Strop.extensions(place)
    picked = ("rate", "p50_ms", "p99_ms", "owner_cpu_ms", "worker_cpu_ms")
    return {name: statistics.median(lap[name] for lap in laps) for name in picked} | {
        "best": max(lap["rate"] for lap in laps),
        "worst": min(lap["rate"] for lap in laps),
        "requests": sum(lap["requests"] for lap in laps),
        "exact": exact,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--relayed", type=int, nargs="*", default=[2, 4, 8], help="numbers that also run relayed")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--json", type=Path, default=RESULTS / "gateway_workers.json")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "python": platform.python_version(),
        "settings": {"seconds": given.seconds, "laps": given.laps},
        "loads": {str(concurrent): {} for concurrent in given.concurrent},
    }
    sides = [(number, False) for number in given.workers] + [(number, True) for number in given.relayed]
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as folder:
        for concurrent in given.concurrent:
            for num_workers, relayed in sides:
                name = f"{num_workers}{' relayed' if relayed else ''}"
                say(f"{concurrent} at a time, {name} workers")
                found["loads"][str(concurrent)][name] = measure(Path(folder), num_workers, relayed, concurrent, given)
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    for concurrent, measured in found["loads"].items():
        show(measured, f"{concurrent} at a time, {found['hardware']['cores']} cores")


def show(sides: dict[str, Any], title: str) -> None:
    table = Table(title=title)
    for column in (
        "workers",
        "requests/s",
        "of linear",
        "p50 ms",
        "p99 ms",
        "owner CPU ms",
        "worker CPU ms",
        "inexact",
    ):
        table.add_column(column, justify="right")
    base = sides.get("1", {}).get("rate")
    for name, side in sides.items():
        linear = f"{side['rate'] / base / int(name.split()[0]):.2f}" if base else ""
        table.add_row(
            name,
            f"{side['rate']:,.0f}",
            linear,
            *(f"{side[key]:.2f}" for key in ("p50_ms", "p99_ms", "owner_cpu_ms", "worker_cpu_ms")),
            str(side["exact"]["branches"]),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
