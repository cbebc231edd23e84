"""The gateway's part of `control_plane.py`: conversations through a served gateway, so many at once."""

from __future__ import annotations

import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from gateway_workers import list_children, read_cpu
from machine import measure_reference
from peers.gateway_lap import TURNS, Load
from peers.gateway_sides import Gateway, Strop, read_memory, started
from peers.processes import PEERS, ROOT, say

NANO = ROOT / "src" / "strop" / "models" / "nano"
LEAST = 1000
"""Rollouts of a lap at least: with few in flight several take their turn."""
Found = dict[str, Any]


def measure(
    place: Path, in_flight: int, rate: float, replicas: int, *words: str, chunks: int = 1, least: int = LEAST
) -> Found:
    """Conversations, so many at once, of a gateway with its store in `place`. `words`: workers, and who has tokens."""
    place.mkdir(exist_ok=True)
    seconds, rollouts = in_flight / rate, max(in_flight, least)
    command = [sys.executable, PEERS / "gateway_strop.py", place, "NORMAL", NANO, *words]
    command += ["--replicas", str(replicas), "--seconds", str(seconds), "--chunks", str(chunks)]
    with started(*command) as gateway, gateway.awake():
        Load(place, 1).run(gateway, 200, 200, ramp=1.0)
        before, idle = _cpu(gateway), _memory(gateway)
        began = time.perf_counter()
        lap = Load(place).run(gateway, rollouts, in_flight, ramp=seconds)
        took, after, memory = time.perf_counter() - began, _cpu(gateway), _memory(gateway)
    requests = lap["requests"]
    owner, workers = ((now - then) * 1000 for now, then in zip(after, before, strict=True))
    return {
        "in_flight": in_flight,
        "rollouts": rollouts,
        "requests": requests,
        "engine_seconds": seconds,
        "chunks_per_answer": chunks,
        "requests_per_second": requests / took,
        "owner_cpu_ms_per_request": lap["cpu_ms"],  # while the load ran; what else it took is the rollouts'
        "worker_cpu_ms_per_request": workers / requests,
        "owner_cpu_ms_per_rollout_beside": (owner - lap["cpu_ms"] * requests) / rollouts,
        "cpu_ms_per_rollout": (owner + workers) / rollouts,
        "added_p50_ms": lap["p50_ms"] - seconds * 1000,
        "added_p99_ms": lap["p99_ms"] - seconds * 1000,
        "kb_each_in_flight": (memory - idle) * 1024 / in_flight,
        "request_bytes": lap["request_bytes"],
        "answer_bytes": lap["answer_bytes"],
        "turns": Strop.extensions(place),
        "store_bytes": (place / "store.sqlite").stat().st_size,
        "reference_ms": measure_reference(),
    }


def _cpu(gateway: Gateway) -> tuple[float, float]:
    return gateway.cpu(), sum(map(read_cpu, list_children(gateway.pid)))


def _memory(gateway: Gateway) -> float:
    """MB of all processes, of which none is given back when a rollout ends."""
    return sum(read_memory(pid) for pid in (gateway.pid, *list_children(gateway.pid)))


def copy_rollouts(place: Path, copies: int) -> int:
    """Put so many copies of all rollouts that ended, with their attempts and turns, into a store nobody has open.
    Returns how many rollouts there are then."""
    with sqlite3.connect(place / "store.sqlite") as db:
        for copy in range(copies):
            for table, ids in (
                ("rollouts", ("id",)),
                ("attempts", ("rollout", "key")),
                ("turns", ("id", "rollout", "parent", "ids_from", "messages_from")),
            ):
                columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] != "seq"]
                values = [f"'c{copy}-' || {name}" if name in ids else name for name in columns]
                mine = f"WHERE {'id' if table == 'rollouts' else 'rollout'} LIKE 'g%'"
                db.execute(f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values)} FROM {table} {mine}")
        (count,) = db.execute("SELECT count(*) FROM rollouts").fetchone()
    return count


def run(folder: Path, sizes: list[int], rate: float, replicas: int) -> Found:
    """One process, then two workers with engines of their own, then two that are given tokens by the owner."""
    found: Found = {"turns_per_rollout": TURNS, "replicas": replicas, "rate": rate, "sides": {}}
    sides: Found = found["sides"]
    for in_flight in sizes:
        say(f"gateway: {in_flight:,} in flight")
        sides[f"1 process, {in_flight}"] = measure(folder / f"one-{in_flight}", in_flight, rate, replicas)
    largest = folder / f"one-{sizes[-1]}"
    ended = copy_rollouts(largest, 4)
    say(f"gateway: {sizes[-2]:,} in flight after {ended:,} have ended")
    later = measure(largest, sizes[-2], rate, replicas)
    sides[f"1 process, {sizes[-2]} after {ended}"] = later | {"ended_before": ended}
    for in_flight in sizes:
        say(f"gateway: {in_flight:,} in flight, 2 workers")
        sides[f"2 workers, {in_flight}"] = measure(folder / f"two-{in_flight}", in_flight, rate, replicas, "2")
    for chunks in (1, 64):
        for way in ((), ("relayed",)):
            name = " ".join(["2 workers", *way])
            say(f"gateway: {chunks} chunks an answer, {name}")
            place = folder / f"{name}-{chunks}".replace(" ", "-")
            side = measure(place, sizes[0], rate / 4, replicas, "2", *way, chunks=chunks, least=300)
            sides[f"{name}, {sizes[0]}, {chunks} chunks"] = side
    return found
