"""Strop's store beside that of another checkout, in one run; and what conversations of 10, 60 and 200 turns take there.

    python benchmarks/store.py --against ../other/checkout      results/store_against.json

Both sides take turns, lap by lap, so that whatever else the machine does hits both alike. A run has several short laps
of each, and the best of them counts: what a neighbour takes from the machine only ever makes a lap slower. A ratio is
the median, over the runs, of this code's rate to the other's in the same run; `cpu_ratio` is the same per second of the
asking process's CPU time. Turns of a conversation are written one by one and read at once; bytes are those of the
file, per rollout, without what an empty store has.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LENGTHS = (10, 60, 200)
ROLLOUTS = 20
OURS, OTHER = "this", "other"

# -- conversations, in a process of either side ------------------------------------------------------------------------


def _turns(rollout: str, attempt: int, length: int) -> list[Any]:
    """A tool's answer of 60 tokens and a call of 40 per turn, the messages of 300 characters each."""
    from strop.types import Turn

    turns: list[Any] = []
    for k in range(length):
        last = turns[-1] if turns else None
        ids = (last.prompt_ids + last.response_ids if last else []) + [(k * 7919 + n) % 150_000 for n in range(60)]
        before = [*last.messages, last.answer] if last else [{"role": "system", "content": "Use the tools. " * 20}]
        turns.append(
            Turn(
                id=f"{rollout}/{attempt}/{k}",
                rollout=rollout,
                attempt=attempt,
                prompt_ids=ids,
                response_ids=[(k * 104_729 + n) % 150_000 for n in range(40)],
                logprobs=[-n / 500 for n in range(40)],
                versions=[(0, "1.0")],
                finish="tool_calls",
                parent=last.id if last else None,
                shared=len(last.prompt_ids) + len(last.response_ids) if last else 0,
                messages=[*before, {"role": "tool", "content": f"result {k}: " * 25}],
                answer={"role": "assistant", "content": f"calling {k}: " * 25},
                started=float(k),
                ended=k + 0.5,
            )
        )
    return turns


async def _converse(folder: str, length: int) -> dict[str, float]:
    from strop.store.sqlite import SqliteStore
    from strop.types import Rollout, Task

    path = Path(folder) / f"{time.time_ns()}.sqlite"
    store = await SqliteStore.open(path)
    await store.close()
    empty = path.stat().st_size
    store = await SqliteStore.open(path)
    ids = [f"g{number}.0" for number in range(ROLLOUTS)]
    for id in ids:
        await store.begin(Rollout(id=id, group=id, member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    talks = [_turns(id, 1, length) for id in ids]
    began = time.perf_counter()
    for turns in talks:
        for turn in turns:
            await store.add_turns([turn])
    written = time.perf_counter()
    for id, turns in zip(ids, talks, strict=True):
        assert await store.turns(id) == turns
    read = time.perf_counter()
    await store.close()
    found = {
        "write_turn": ROLLOUTS * length / (written - began),
        "read_turn": ROLLOUTS * length / (read - written),
        "bytes_per_rollout": (path.stat().st_size - empty) / ROLLOUTS,
    }
    path.unlink()
    return found


def _answer() -> None:
    """Laps on demand: a JSON line in, a JSON line out."""
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(asyncio.run(_converse(order["folder"], order["length"]))), flush=True)


# -- both sides --------------------------------------------------------------------------------------------------------


def compare(folder: Path, other: Path, *, quick: bool) -> dict[str, Any]:
    from peers.processes import PEERS, ROOT, LapProcess, our_server, say

    runs, num_laps, items, many = (2, 2, 96, 400) if quick else (5, 6, 400, 2000)
    orders = {
        "1 caller": {"kind": "singles", "callers": 1, "items": items},
        "16 callers": {"kind": "singles", "callers": 16, "items": items},
        "batches of 100": {"kind": "batches", "callers": 1, "items": many},
    }
    sides = {OURS: ROOT, OTHER: other}
    laps: dict[str, dict[str, list[dict[str, dict[str, float]]]]] = {}
    talks: dict[int, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as stack:

        def process(checkout: Path, script: Path, *arguments: str) -> LapProcess:
            made = LapProcess(sys.executable, script, *arguments, checkout=checkout)
            stack.callback(made.close)
            return made

        verbs = {side: process(root, PEERS / "strop_store.py") for side, root in sides.items()}
        talkers = {side: process(root, Path(__file__), "lap") for side, root in sides.items()}
        servers = {side: stack.enter_context(our_server(folder / side, checkout=root)) for side, root in sides.items()}
        here = {"folder": str(folder), "synchronous": "NORMAL"}
        for number in range(runs):
            for name, order in orders.items():
                say(f"run {number + 1} of {runs}: {name}")
                for place in ("in process", "over HTTP"):
                    best: dict[str, dict[str, dict[str, float]]] = {side: {} for side in sides}
                    for side in _turns_of(num_laps):
                        where = here if place == "in process" else servers[side]
                        _keep_best(best[side], verbs[side].lap(**order, **where))
                    for side, found in best.items():
                        laps.setdefault(f"{place}, {name}", {}).setdefault(side, []).append(found)
            for length in LENGTHS:
                for side in _turns_of(1 + number % 2)[-2:]:
                    found = talks.setdefault(length, {}).setdefault(side, [])
                    found.append(talkers[side].lap(folder=str(folder), length=length))  # pyright: ignore
    return {
        "settings": {"runs": runs, "laps_of_a_run": num_laps, "orders": orders, "rollouts_of_conversations": ROLLOUTS},
        "verbs": {name: _verbs(found) for name, found in laps.items()},
        "conversations": {str(length): _conversation(found) for length, found in talks.items()},
    }


def _turns_of(num_laps: int) -> list[str]:
    """Whose lap it is: neither side always comes first."""
    return [side for number in range(num_laps) for side in ([OURS, OTHER] if number % 2 else [OTHER, OURS])]


def _keep_best(best: dict[str, dict[str, float]], lap: dict[str, dict[str, float]]) -> None:
    for verb, figures in lap.items():
        known = best.setdefault(verb, dict(figures))
        for rate in ("rate", "cpu_rate"):
            known[rate] = max(known[rate], figures[rate])


def _verbs(found: dict[str, list[dict[str, dict[str, float]]]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for verb in found[OURS][0]:
        rates = {side: [lap[verb]["rate"] for lap in laps] for side, laps in found.items()}
        per_cpu = {side: [lap[verb]["cpu_rate"] for lap in laps] for side, laps in found.items()}
        table[verb] = {side: statistics.median(some) for side, some in rates.items()}
        table[verb] |= {"ratio": _ratio(rates), "cpu_ratio": _ratio(per_cpu)}
    return table


def _conversation(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    table: dict[str, Any] = {"bytes_per_rollout": {side: laps[0]["bytes_per_rollout"] for side, laps in found.items()}}
    for verb in ("write_turn", "read_turn"):
        rates = {side: [lap[verb] for lap in laps] for side, laps in found.items()}
        table[verb] = {side: statistics.median(some) for side, some in rates.items()} | {"ratio": _ratio(rates)}
    return table


def _ratio(rates: dict[str, list[float]]) -> float:
    return statistics.median(ours / other for ours, other in zip(rates[OURS], rates[OTHER], strict=True))


def show(found: dict[str, Any]) -> None:
    for name, verbs in found["verbs"].items():
        told = ", ".join(f"{verb} {row['ratio']:.2f}x (cpu {row['cpu_ratio']:.2f}x)" for verb, row in verbs.items())
        print(f"{name}: {told}")
    for length, figures in found["conversations"].items():
        sizes = figures["bytes_per_rollout"]
        print(
            f"{length} turns: {sizes[OURS] / 1000:,.0f} kB per rollout, {sizes[OURS] / int(length):,.0f} bytes per turn"
            f" (other: {sizes[OTHER] / 1000:,.0f} kB); write {figures['write_turn']['ratio']:.2f}x, "
            f"read {figures['read_turn']['ratio']:.2f}x"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["lap"]:
        _answer()
