"""Strop's gateway beside four others: requests per second, added latency, CPU, memory; and how its cost grows.

    python benchmarks/gateway.py [--quick] [--part peer|long|memory|all] [--json FILE] [--model FOLDER]
    python benchmarks/gateway.py --setup      only make the peers' virtualenvs, in .peers/

    peer       laps of all sides with 1, 32 and 256 rollouts at a time. Each rollout holds a tool conversation of 2, 4,
               ..., 12 messages whose answers (64 tokens with logprobs) it gives back as it got them. Sides take turns
               within one run, and only the one that is measured is awake. Figures are medians of several laps.
    long       conversations of up to 60 messages: what a turn costs by its place in the conversation
    memory     100,000 requests of rollouts that come and go: does it grow?

What is compared is not the same work. A peer passes a request on to a model server over HTTP, here a mock in C that
costs next to nothing (`peers/gateway_mock.c`), and keeps what it keeps in memory (`peers/gateway_sides.py` says what,
and how each was set up). Ours has the engine in its own process, as `strop train` runs it: it renders prompts, extends
recorded ids, detokenises and parses the answer, and has every turn in SQLite before its answer is sent. The engine
answers at once, so all of our latency is the gateway's; from a peer's the mock's p50 is taken off.

The load comes from a program in C (`peers/gateway_load.c`); what it reaches against the bare mock is the ceiling.
Our tokens are those of the model in the box unless `--model` names another folder with a tokenizer and a template.

Left out: streaming (not every peer has it), several workers, TLS.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from machine import hardware
from peers import gateway_conversation as conversation
from peers.gateway_lap import TURNS, Lap, Load, check, mock
from peers.gateway_sides import PEER_SIDES, Gateway, Side, Strop
from peers.processes import ROOT, say
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
NANO = ROOT / "src" / "strop" / "models" / "nano"
CONCURRENT = [1, 32, 256]
OURS, OURS_FULL, LITELLM, MOCK = "strop", "strop FULL", "litellm", "bare mock"

# -- part: peer --------------------------------------------------------------------------------------------------------


def compare(folder: Path, quick: bool, model: Path) -> dict[str, Any]:
    repetitions, seconds = (2, 1.0) if quick else (5, 2.5)
    sides: list[Side] = [Strop(model=model), Strop(OURS_FULL, synchronous="FULL", model=model), *PEER_SIDES]
    for side in PEER_SIDES:
        side.set_up()
    load = Load(folder)
    laps: dict[str, dict[int, list[Lap]]] = {side.name: {c: [] for c in CONCURRENT} for side in sides}
    with ExitStack() as stack:
        upstream = stack.enter_context(mock(folder))
        laps[MOCK] = {c: [load.run(upstream, 40_000, c, seconds=seconds / 2)] for c in CONCURRENT}
        gateways: dict[str, Gateway] = {}
        rates: dict[str, float] = {}
        for side in sides:
            say(f"starting {side.name}")
            gateways[side.name] = gateway = stack.enter_context(side.serving(folder, f"{upstream.url}/v1"))
            with gateway.awake():
                check(gateway)
                rates[side.name] = load.run(gateway, 200, 8, seconds=seconds)["rate"]  # warm, and how many to make
        for repetition in range(repetitions):
            for concurrent in CONCURRENT:
                say(f"lap {repetition + 1} of {repetitions}: {concurrent} at a time")
                first = repetition % len(sides)
                for side in sides[first:] + sides[:first]:
                    gateway, enough = gateways[side.name], rates[side.name] * seconds * 3 / TURNS
                    with gateway.awake():
                        lap = load.run(gateway, int(enough) + 2 * concurrent, concurrent, seconds=seconds)
                    rates[side.name] = max(rates[side.name], lap["rate"])
                    laps[side.name][concurrent].append(lap)
    exact = Strop.extensions(folder / OURS)
    return {
        "settings": {
            "repetitions": repetitions,
            "seconds": seconds,
            "concurrent": CONCURRENT,
            "messages": [2 * turn + 2 for turn in range(TURNS)],
            "sampled_tokens": conversation.NUM_TOKENS,
            "model": model.name,
            "sides": {side.name: {"settings": side.settings, "keeps": side.keeps} for side in sides},
            "peer_versions": {side.name: side.versions() for side in PEER_SIDES},
        },
        "exact": exact | {"counts": dict(sum((Counter(lap["counts"]) for lap in _all(laps[OURS])), Counter[str]()))},
        "sides": {name: {str(c): figures(found) for c, found in by.items()} for name, by in laps.items()},
    }


def _all(by_concurrent: dict[int, list[Lap]]) -> list[Lap]:
    return [lap for laps in by_concurrent.values() for lap in laps]


def figures(laps: Sequence[Lap]) -> dict[str, float]:
    def middle(key: str) -> float:
        return statistics.median(lap[key] for lap in laps)

    return {
        "rate": middle("rate"),
        "best": max(lap["rate"] for lap in laps),
        "worst": min(lap["rate"] for lap in laps),
        "p50_ms": middle("p50_ms"),
        "best_p50_ms": min(lap["p50_ms"] for lap in laps),
        "p99_ms": middle("p99_ms"),
        "cpu_ms": middle("cpu_ms"),
        "best_cpu_ms": min(lap["cpu_ms"] for lap in laps),
        "rss_mb": laps[-1]["rss_mb"],
        "rss_mb_first": laps[0]["rss_mb"],
        "requests": sum(lap["requests"] for lap in laps),
        "request_bytes": middle("request_bytes"),
        "answer_bytes": middle("answer_bytes"),
    }


def goals(part: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, and what was: our median to the best lap of a peer, and to its median."""
    sides = part["sides"]
    at_32, at_1 = sides[OURS]["32"], sides[OURS]["1"]
    others = {name: sides[name]["32"] for name in (side.name for side in PEER_SIDES) if name != LITELLM}
    best = max(others, key=lambda name: others[name]["rate"])
    return [
        {
            "goal": "requests/s at 32, to LiteLLM's",
            "wanted": 20.0,
            "to_its_best": at_32["rate"] / sides[LITELLM]["32"]["best"],
            "to_its_median": at_32["rate"] / sides[LITELLM]["32"]["rate"],
        },
        {
            "goal": f"requests/s at 32, to the best other's ({best})",
            "wanted": 5.0,
            "to_its_best": at_32["rate"] / max(other["best"] for other in others.values()),
            "to_its_median": at_32["rate"] / others[best]["rate"],
        },
        {"goal": "added p50 at 1, ms", "wanted": 1.5, "median": at_1["p50_ms"], "best": at_1["best_p50_ms"]},
    ]


def show_comparison(out: Console, part: dict[str, Any]) -> None:
    sides = part["sides"]
    for concurrent in map(str, CONCURRENT):
        table = Table(title=f"{concurrent} at a time", title_justify="left")
        columns = ("", "requests/s", "best", "worst", "added p50 ms", "added p99 ms", "CPU ms", "RSS MB", "keeps it in")
        for column in columns:
            table.add_column(column, justify="left" if column in ("", columns[-1]) else "right", no_wrap=True)
        for name, about in part["settings"]["sides"].items():
            side, taken = sides[name][concurrent], 0.0
            if name not in (OURS, OURS_FULL):
                taken = sides[MOCK][concurrent]["p50_ms"]
            table.add_row(
                f"[bold]{name}[/]" if name == OURS else name,
                *(f"{side[key]:,.0f}" for key in ("rate", "best", "worst")),
                f"{side['p50_ms'] - taken:,.2f}",
                f"{side['p99_ms'] - taken:,.2f}",
                f"{side['cpu_ms']:.2f}",
                f"{side['rss_mb']:,.0f}",
                about["keeps"].partition(",")[0] if name not in (OURS, OURS_FULL) else about["keeps"].partition(" ")[0],
            )
        out.print(table)
        out.print(
            f"ceiling: the load reaches {sides[MOCK][concurrent]['rate']:,.0f} requests/s against the bare mock\n"
        )
    exact = part["exact"]
    out.print(
        f"{OURS}: of {exact['turns']:,} turns {exact['first']:,} began a conversation, {exact['extended_exactly']:,} "
        f"extended theirs exactly, {exact['branches']:,} did not"
    )
    for goal in goals(part):
        if "median" in goal:
            good, reached = goal["median"] < goal["wanted"], f"{goal['median']:.2f} (best lap {goal['best']:.2f})"
            wanted = f"under {goal['wanted']:g}"
        else:
            good, wanted = goal["to_its_best"] >= goal["wanted"], f"at least {goal['wanted']:g}x"
            reached = f"{goal['to_its_best']:.1f}x its best lap, {goal['to_its_median']:.1f}x its median"
        out.print(f"goal: {goal['goal']}: {wanted}; [bold]{reached}[/]: {'reached' if good else 'NOT reached'}")


# -- part: long --------------------------------------------------------------------------------------------------------


def long(folder: Path, quick: bool, model: Path) -> dict[str, Any]:
    """All rollouts take a turn before any takes the next, so that CPU time can be told apart by turn."""
    turns, rollouts, repetitions = 30, (16 if quick else 80), (1 if quick else 3)
    load = Load(folder, turns)
    laps: list[Lap] = []
    with Strop("strop long", model=model).serving(folder, "") as gateway:
        load.run(gateway, 16, 8)
        for repetition in range(repetitions):
            say(f"lap {repetition + 1} of {repetitions}: {rollouts} conversations of {2 * turns} messages")
            laps.append(load.run(gateway, rollouts, 8, by_turn=True))
    exact = Strop.extensions(folder / "strop-long")
    points: list[dict[str, float]] = []
    for turn in range(turns):
        found = [lap["turns"][turn] for lap in laps]
        points.append(
            {
                "messages": 2 * turn + 2,
                "cpu_ms": statistics.median(one["cpu_ms"] for one in found),
                "best_cpu_ms": min(one["cpu_ms"] for one in found),
                "p50_ms": statistics.median(one["p50_ms"] for one in found),
            }
        )
    grown = points[1:]  # the first turn also opens a session, and extends nothing
    slope, start = np.polyfit([p["messages"] for p in grown], [p["best_cpu_ms"] for p in grown], 1)
    return {
        "settings": {"rollouts": rollouts, "repetitions": repetitions, "at_a_time": 8, "model": model.name},
        "exact": exact,
        "points": points,
        "cpu_ms_at_0_messages": float(start),
        "cpu_ms_per_10_messages": 10 * float(slope),
        "last_to_second": points[-1]["best_cpu_ms"] / points[1]["best_cpu_ms"],
    }


def show_long(out: Console, part: dict[str, Any]) -> None:
    table = Table(title="one turn of a conversation, by its length", title_justify="left")
    for column in ("messages", "CPU ms (median)", "CPU ms (best lap)", "p50 ms, 8 at a time"):
        table.add_column(column, justify="right")
    for point in [part["points"][0], *part["points"][1::4]]:
        row = (f"{point['cpu_ms']:.3f}", f"{point['best_cpu_ms']:.3f}", f"{point['p50_ms']:.2f}")
        table.add_row(f"{point['messages']:.0f}", *row)
    out.print(table)
    out.print(
        f"a turn costs [bold]{part['cpu_ms_at_0_messages']:.2f} ms + {part['cpu_ms_per_10_messages']:.3f} ms per 10 "
        f"messages before it[/]; the last of 60 costs {part['last_to_second']:.2f}x the second. "
        f"{part['exact']['branches']} of {part['exact']['turns']:,} turns did not extend exactly"
    )


# -- part: memory ------------------------------------------------------------------------------------------------------


def memory(folder: Path, quick: bool, model: Path) -> dict[str, Any]:
    total, every = (5_000, 500) if quick else (100_000, 5_000)
    load, rollouts = Load(folder), -(-every // TURNS)
    requests, curve, counts = 0, list[dict[str, float]](), Counter[str]()
    with Strop("strop memory", model=model).serving(folder, "") as gateway:
        curve.append({"requests": 0, "rss_mb": gateway.memory()})
        while requests < total:
            lap = load.run(gateway, rollouts, 32)
            requests += lap["requests"]
            counts.update(lap["counts"])
            curve.append({"requests": requests, "rss_mb": gateway.memory()})
            say(f"{requests:>7,} requests, {curve[-1]['rss_mb']:.1f} MB, {lap['rate']:,.0f}/s")
    size = (folder / "strop-memory" / "store.sqlite").stat().st_size
    warm = [point for point in curve if point["requests"] >= total / 5]
    slope = np.polyfit([p["requests"] for p in warm], [p["rss_mb"] for p in warm], 1)[0]
    return {
        "settings": {"at_a_time": 32, "every": every, "warm_after": total / 5, "model": model.name},
        "requests": requests,
        "counts": dict(counts),
        "curve": curve,
        "kb_per_1000_requests": float(slope) * 1024 * 1000,
        "mb_since_warm": warm[-1]["rss_mb"] - warm[0]["rss_mb"],
        "store_bytes": size,
    }


def show_memory(out: Console, part: dict[str, Any]) -> None:
    table = Table(title="memory of the gateway's process, its store included", title_justify="left")
    table.add_column("requests", justify="right")
    table.add_column("RSS MB", justify="right")
    for point in part["curve"]:
        table.add_row(f"{point['requests']:,.0f}", f"{point['rss_mb']:.1f}")
    out.print(table)
    out.print(
        f"after warm-up: [bold]{part['kb_per_1000_requests']:+.1f} KB per 1,000 requests[/], "
        f"{part['mb_since_warm']:+.1f} MB in all; the store's file has {part['store_bytes'] / 1e6:,.0f} MB"
    )


# -- all of it ---------------------------------------------------------------------------------------------------------


def draw(found: dict[str, Any], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, turns, grown) = plt.subplots(1, 3, figsize=(13, 3.8), dpi=150, width_ratios=[1.5, 1, 1])
    if part := found.get("peer"):
        names = [OURS, *(side.name for side in PEER_SIDES)]
        for index, concurrent in enumerate(CONCURRENT):
            shown = [part["sides"][name][str(concurrent)] for name in names]
            at = np.arange(len(names)) + (index - 1) * 0.27
            bars.bar(at, [one["rate"] for one in shown], 0.25, label=f"{concurrent} at a time")
            spread = [[one["rate"] - one["worst"] for one in shown], [one["best"] - one["rate"] for one in shown]]
            bars.errorbar(at, [one["rate"] for one in shown], yerr=spread, fmt="none", ecolor="black", lw=0.7)
        bars.set_xticks(range(len(names)), names, fontsize=8)
        bars.set_yscale("log")
        bars.set_title("requests/s (median, best and worst lap)", fontsize=9)
        bars.legend(frameon=False, fontsize=8)
    if part := found.get("long"):
        messages = [point["messages"] for point in part["points"]]
        turns.plot(messages, [point["cpu_ms"] for point in part["points"]], alpha=0.4, label="median")
        turns.plot(messages, [point["best_cpu_ms"] for point in part["points"]], label="best lap")
        turns.set_ylim(0)
        turns.set_xlabel("messages")
        turns.set_title("CPU ms per turn, by the conversation's length", fontsize=9)
        turns.legend(frameon=False, fontsize=8)
    if part := found.get("memory"):
        grown.plot([p["requests"] for p in part["curve"]], [p["rss_mb"] for p in part["curve"]], "o-", ms=3)
        grown.set_ylim(0)
        grown.set_xlabel("requests")
        grown.set_title("memory, MB", fontsize=9)
    for axes in (bars, turns, grown):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["peer", "long", "memory", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/gateway.json")
    parser.add_argument("--model", type=Path, metavar="FOLDER", default=NANO, help="whose tokenizer and template")
    parser.add_argument("--setup", action="store_true", help="only make the peers' virtualenvs")
    arguments = parser.parse_args()
    if arguments.setup:
        for side in PEER_SIDES:
            side.set_up()
            say(f"{side.name} runs on {side.interpreter}")
        return
    results = arguments.json or (None if arguments.quick else RESULTS / "gateway.json")
    parts = {"peer": compare, "long": long, "memory": memory}
    shows = {"peer": show_comparison, "long": show_long, "memory": show_memory}
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
            measured = parts[name](Path(folder), arguments.quick, arguments.model)
            found[name] = {**about, "versions": versions, "load_after": os.getloadavg(), **measured}
            if name == "peer":
                found[name]["goals"] = goals(measured)
            if results is not None:
                results.parent.mkdir(parents=True, exist_ok=True)
                results.write_text(json.dumps(found, indent=1) + "\n")
                draw(found, results.with_suffix(".png"))
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    for name in names:
        shows[name](out, found[name])


if __name__ == "__main__":
    main()
