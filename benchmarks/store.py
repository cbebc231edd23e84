"""Strop's store: how fast it is beside Agent Lightning 0.3.0's, how its cost grows, a thousand rollouts at once.

    python benchmarks/store.py [--quick] [--part peer|growth|thousand|all] [--json FILE]
    python benchmarks/store.py --against ../other/checkout     this code beside that one's (store_against.py)
    python benchmarks/store.py --setup      only make the peer's virtualenv, in .peers/

    peer       laps (`peers/lap.py`) of both sides, in process and over HTTP, by 1 and by 16 callers. Sides take turns
               within one run, so that whatever else the machine does hits both alike. Rates are medians of several
               laps; the ratio in bold is our median to the *best* lap of the peer. Beside it stands the CPU time that
               client and server took together: on a machine that others use as well, it says more than the clock.
               `list` asks for one page of 100 rollouts again and again while none of them changes: ours makes it once.
    growth     the time of a whole rollout (enqueue, lease, one event, finish) while 100,000 of them pile up
    thousand   a thousand rollouts of an async agent through one `strop serve` and one `strop runner`

What the peer keeps is lost with its process; ours is in SQLite (WAL) when a call returns: with synchronous=NORMAL it
survives kill -9, with FULL power loss too. Both are measured. How the peer was set up: `peers/agentlightning_store.py`.

Left out: PostgreSQL on our side and MongoDB on the peer's, and more than one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import store_against
import uvloop
from machine import hardware
from peers.processes import PEER, PEER_PINS, PEERS, ROOT, LapProcess, Laps, our_server, peer_server, say, set_up
from rich.console import Console
from rich.table import Table

from strop.store.remote import HttpStore
from strop.store.sqlite import SqliteStore
from strop.types import Event, Reward, Rollout, Task

RESULTS = ROOT / "benchmarks" / "results"
POINTS = [1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000]
PEER_SIDE, OURS, OURS_FULL = "agentlightning", "strop", "strop FULL"

# -- part: peer --------------------------------------------------------------------------------------------------------


def compare(folder: Path, quick: bool) -> dict[str, Any]:
    """Laps of all sides, taking turns. Returns, per place and lap, each verb's figures of each side."""
    repetitions, items, many = (2, 96, 400) if quick else (5, 400, 2000)
    python = set_up()
    orders = {
        "1 caller": {"kind": "singles", "callers": 1, "items": items},
        "16 callers": {"kind": "singles", "callers": 16, "items": items},
        "batches of 100": {"kind": "batches", "callers": 1, "items": many},
    }
    found: dict[str, dict[str, dict[str, list[Laps]]]] = {}
    with ExitStack() as stack:
        theirs = LapProcess(python, PEERS / "agentlightning_store.py", "laps")
        stack.callback(theirs.close)
        ours = LapProcess(sys.executable, PEERS / "strop_store.py")
        stack.callback(ours.close)
        normal, full = folder / "served", folder / "served-full"
        places: dict[str, list[tuple[str, LapProcess, dict[str, Any]]]] = {
            "in process": [
                (PEER_SIDE, theirs, {}),
                (OURS, ours, {"folder": str(folder), "synchronous": "NORMAL"}),
                (OURS_FULL, ours, {"folder": str(folder), "synchronous": "FULL"}),
            ],
            "over HTTP": [
                (PEER_SIDE, theirs, stack.enter_context(peer_server(python))),
                (OURS, ours, stack.enter_context(our_server(normal))),
                (OURS_FULL, ours, stack.enter_context(our_server(full, "FULL"))),
            ],
        }
        for repetition in range(repetitions):
            for place, sides in places.items():
                for name, order in orders.items():
                    say(f"lap {repetition + 1} of {repetitions}: {place}, {name}")
                    first = repetition % len(sides)
                    for side, process, where in sides[first:] + sides[:first]:
                        laps = found.setdefault(place, {}).setdefault(name, {}).setdefault(side, [])
                        laps.append(process.lap(**order, **where))
    return {
        "settings": {
            "repetitions": repetitions,
            "orders": orders,
            "strop": "SQLite, WAL, synchronous=NORMAL or FULL; `strop serve`, HttpStore, uvloop",
            "agentlightning": "in memory, thread_safe=False, constant span size; launch mode asyncio, one worker, "
            "uvloop, httptools; LightningStoreClient; batches of spans as OTLP",
            "peer_versions": peer_versions(python),
        },
        "places": {place: {name: figures(sides) for name, sides in laps.items()} for place, laps in found.items()},
    }


def figures(sides: dict[str, list[Laps]]) -> dict[str, Any]:
    """Per verb: what each side did over its laps, and how our medians compare."""
    table: dict[str, Any] = {}
    for verb in sides[PEER_SIDE][0]:
        row: dict[str, Any] = {}
        for side, laps in sides.items():
            rates = [lap[verb]["rate"] for lap in laps]
            row[side] = {
                "rate": statistics.median(rates),
                "best": max(rates),
                "worst": min(rates),
                "p50_ms": statistics.median(lap[verb]["p50_ms"] for lap in laps),
                "p99_ms": statistics.median(lap[verb]["p99_ms"] for lap in laps),
                "cpu_us": statistics.median(lap[verb]["cpu_us"] for lap in laps),
            }
        row["ratio_to_median"] = row[OURS]["rate"] / row[PEER_SIDE]["rate"]
        row["ratio_to_best"] = row[OURS]["rate"] / row[PEER_SIDE]["best"]
        row["ratio_of_cpu"] = row[PEER_SIDE]["cpu_us"] / row[OURS]["cpu_us"]
        table[verb] = row
    return table


def peer_versions(python: Path) -> dict[str, str]:
    names = [pin.partition("==")[0] for pin in PEER + PEER_PINS]
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)


def show_comparison(out: Console, part: dict[str, Any]) -> None:
    for place, laps in part["places"].items():
        for name, verbs in laps.items():
            table = Table(title=f"{place}, {name}: per second (p50 / p99 in ms)", title_justify="left")
            sides = ("agentlightning", "its best", "strop", "strop FULL")
            for column in ("", *sides, "to its median", "to its best", "in CPU"):
                table.add_column(column, justify="left" if not column else "right", no_wrap=True)
            for verb, row in verbs.items():
                table.add_row(
                    verb,
                    *(_cell(row[PEER_SIDE]), f"{row[PEER_SIDE]['best']:,.0f}", _cell(row[OURS]), _cell(row[OURS_FULL])),
                    f"{row['ratio_to_median']:.1f}x",
                    f"[bold]{row['ratio_to_best']:.1f}x[/]",
                    f"{row['ratio_of_cpu']:.1f}x",
                )
            out.print(table)


def _cell(side: dict[str, float]) -> str:
    return f"{side['rate']:,.0f} ({side['p50_ms']:.2f} / {side['p99_ms']:.2f})"


# -- part: growth ------------------------------------------------------------------------------------------------------


def growth(folder: Path, quick: bool) -> dict[str, Any]:
    points = [point for point in POINTS if point <= 5_000] if quick else POINTS
    path = folder / "growth.sqlite"
    return {**uvloop.run(_grow(path, points)), "bytes": path.stat().st_size}


async def _grow(path: Path, points: Sequence[int], callers: int = 16, chunk: int = 500) -> dict[str, Any]:
    store = await SqliteStore.open(path)

    async def whole(number: int) -> None:
        group = f"g{number:06}"
        task = Task(id=f"t{number}", data={"question": "What is 3 * 4?" * 16})
        await store.enqueue([Rollout(id=f"{group}.0", group=group, member=0, task=task, created=1.0)])
        (leased,) = await store.lease("runner", seconds=600)
        of = {"rollout": leased.rollout.id, "attempt": leased.attempt.number}
        await store.add_events([Event(**of, kind="message", data={"text": "well, it is twelve"}, time=1.0)])
        await store.finish(leased.rollout.id, leased.attempt.number, rewards=[Reward(value=1.0)])

    stored, seconds, curve = [0], [0.0], []
    while stored[-1] < points[-1]:
        numbers = iter(range(stored[-1], stored[-1] + chunk))

        async def caller(numbers: Any = numbers) -> None:
            for number in numbers:
                await whole(number)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        took = time.perf_counter() - began
        stored.append(stored[-1] + chunk)
        seconds.append(seconds[-1] + took)
        curve.append(took / chunk * 1000)
        if stored[-1] in points:
            say(f"{stored[-1]:>7,} stored after {seconds[-1]:.1f} s; {curve[-1]:.3f} ms per rollout now")
    await store.close()
    at = [stored.index(point) for point in points]
    slope = float(np.polyfit(np.log(points), np.log([seconds[index] for index in at]), 1)[0])
    rows = []
    for before, now in zip([0, *at], at, strict=False):
        cost = (seconds[now] - seconds[before]) / (stored[now] - stored[before]) * 1000
        rows.append({"stored": stored[now], "seconds": seconds[now], "ms_per_rollout_since_last": cost})
    return {
        "settings": {"store": "SQLite in process, WAL, synchronous=NORMAL", "callers": callers},
        "points": rows,
        "exponent": slope,
        "ms_per_rollout_by_chunk": {"chunk": chunk, "ms": [round(ms, 4) for ms in curve]},
    }


def show_growth(out: Console, part: dict[str, Any], picture: Path | None) -> None:
    table = Table(title="a whole rollout as rollouts pile up (SQLite in process, 16 callers)", title_justify="left")
    for column in ("stored", "seconds so far", "ms per rollout since the last point"):
        table.add_column(column, justify="right")
    for row in part["points"]:
        table.add_row(f"{row['stored']:,}", f"{row['seconds']:.1f}", f"{row['ms_per_rollout_since_last']:.3f}")
    out.print(table)
    out.print(f"time ~ count^[bold]{part['exponent']:.3f}[/]; the file has {part['bytes'] / 1e6:.0f} MB")
    if picture is not None:
        _draw(part, picture)


def _draw(part: dict[str, Any], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    chunk, costs = part["ms_per_rollout_by_chunk"]["chunk"], part["ms_per_rollout_by_chunk"]["ms"]
    axes.plot([chunk * (index + 1) for index in range(len(costs))], costs, lw=0.6, alpha=0.4, label=f"every {chunk}")
    points = part["points"]
    axes.plot(
        [row["stored"] for row in points],
        [row["ms_per_rollout_since_last"] for row in points],
        "o-",
        label="mean since",
    )
    axes.set_xscale("log")
    axes.set_ylim(0, 3 * float(np.median(costs)))  # one slow chunk of a busy machine must not flatten the rest
    axes.set_xlabel("rollouts stored")
    axes.set_ylabel("ms per rollout")
    axes.set_title(f"enqueue + lease + event + finish; total time ~ count^{part['exponent']:.2f}", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


# -- part: thousand ----------------------------------------------------------------------------------------------------


def thousand(folder: Path, quick: bool) -> dict[str, Any]:
    count = 200 if quick else 1000
    place = folder / "thousand"
    with our_server(place) as where:
        uvloop.run(_queue(where, count))
        began = time.perf_counter()
        agent = ["--agent", f"{PEERS / 'waiting_agent.py'}:agent", "--workers", str(count)]
        settings = ["--set", "runner.agents_in=loop", "--until-empty", "--json"]
        runner = ["runner", "--url", where["url"], *agent, *settings]
        environment = {**os.environ, "FELLOWS": str(count), "STROP_KEY": where["key"]}
        done = subprocess.run([sys.executable, "-m", "strop.cli", *runner], env=environment, stdout=subprocess.PIPE)
        process_seconds = time.perf_counter() - began
    counts = json.loads(done.stdout or "{}")
    if counts.get("succeeded") != count:
        raise SystemExit(f"{count} rollouts were queued, and this came of them: {counts}")
    with sqlite3.connect(place / "store.sqlite") as db:
        first, last_start, last = db.execute("SELECT min(started), max(started), max(ended) FROM attempts").fetchone()
    return {
        "settings": {"servers": 1, "runners": 1, "agents_in": "loop", "store": "SQLite, synchronous=NORMAL"},
        "rollouts": count,
        "at_once": count,  # no agent ends before all have begun
        "seconds": last - first,
        "seconds_until_all_run": last_start - first,
        "rollouts_per_second": count / (last - first),
        "seconds_of_the_runner_process": process_seconds,
    }


async def _queue(where: dict[str, Any], count: int) -> None:
    store = await HttpStore.open(where["url"], where["key"])
    tasks = [Task(id=f"t{number}", data={"number": number}) for number in range(count)]
    made = [Rollout(id=f"{t.id}.0", group=t.id, member=0, task=t, mode="eval", created=1.0) for t in tasks]
    await store.enqueue(made)
    await store.close()


def show_thousand(out: Console, part: dict[str, Any]) -> None:
    out.print(
        f"{part['rollouts']:,} rollouts, all {part['at_once']:,} at once, one server, one runner: "
        f"[bold]{part['seconds']:.2f} s[/], [bold]{part['rollouts_per_second']:,.0f}/s[/] "
        f"(all running after {part['seconds_until_all_run']:.2f} s; "
        f"{part['seconds_of_the_runner_process']:.1f} s with the runner's start and end)"
    )


# -- all of it ---------------------------------------------------------------------------------------------------------


def against(other: Path, results: Path, *, quick: bool) -> None:
    (ROOT / "runs").mkdir(exist_ok=True)
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware()}
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as folder:
        found = store_against.compare(Path(folder), other, quick=quick)
    if not quick:
        results.write_text(json.dumps(about | {"load_after": os.getloadavg()} | found, indent=1) + "\n")
    store_against.show(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["peer", "growth", "thousand", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/store.json")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="only compare with the store of a checkout")
    parser.add_argument("--setup", action="store_true", help="only make the peer's virtualenv")
    arguments = parser.parse_args()
    if arguments.setup:
        say(f"the peer runs on {set_up()}")
        return
    if arguments.against:
        return against(arguments.against, arguments.json or RESULTS / "store_against.json", quick=arguments.quick)
    results = arguments.json or (None if arguments.quick else RESULTS / "store.json")
    parts = {"peer": compare, "growth": growth, "thousand": thousand}
    names = list(parts) if arguments.part == "all" else [arguments.part]
    found: dict[str, Any] = json.loads(results.read_text()) if results and results.is_file() else {}
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as folder:
        for name in names:
            about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware()}
            versions = {
                "strop": version("strop"),
                "python": platform.python_version(),
                "sqlite": sqlite3.sqlite_version,
            }
            measured = parts[name](Path(folder), arguments.quick)
            found[name] = {**about, "versions": versions, "load_after": os.getloadavg(), **measured}
            if results is not None:
                results.parent.mkdir(parents=True, exist_ok=True)
                results.write_text(json.dumps(found, indent=1) + "\n")
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    for name in names:
        if name == "peer":
            show_comparison(out, found[name])
        elif name == "growth":
            show_growth(out, found[name], results.with_name("store_growth.png") if results else None)
        else:
            show_thousand(out, found[name])


if __name__ == "__main__":
    main()
