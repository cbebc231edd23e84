"""One lap around a store: every verb so many times by so many callers at once, each call timed.

    stdin: {"callers": 16, "items": 400, ...} ──▶ lap ──▶ stdout: {"enqueue": {"rate": ..., "p50_ms": ...}, ...}

Both sides of the comparison run this very file, the peer in its own virtualenv, so it needs the standard library only.
What goes into a call (rollouts, events, turns, spans) is made before the clock starts.

Left out: callers in several processes. Both sides are asked by one process of theirs, over one client.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

A = TypeVar("A")
R = TypeVar("R")
Timing = dict[str, float]

BATCH = 100
"""How many things one call of a batch verb carries."""
PAGE = 100
"""How many rollouts one look at the list returns."""
_servers: list[int] = []
"""The processes that serve the store of this lap, whose CPU time counts as this one's does."""

TASK = {
    "question": "A train leaves at nine and travels 240 km at 80 km/h. When does it arrive? " * 3,
    "answer": "12:00",
}
REPORT = {"name": "reward", "value": 1.0, "note": "the answer was right and came in the form that was asked for"}
PROMPT_IDS = [(index * 7919) % 150_000 for index in range(256)]
RESPONSE_IDS = [(index * 104_729) % 150_000 for index in range(64)]
LOGPROBS = [-((index * 37) % 1000) / 500 for index in range(64)]


class Side(ABC):
    """A store as one side speaks it. `made_*` run outside the clock. What is leased is opaque to the lap."""

    @abstractmethod
    def made_rollout(self, number: int) -> Any: ...

    @abstractmethod
    def made_event(self, leased: Any) -> Any: ...

    @abstractmethod
    def made_turn(self, leased: Any) -> Any: ...

    @abstractmethod
    async def enqueue(self, rollout: Any) -> None: ...

    @abstractmethod
    async def lease(self, runner: str) -> Any: ...

    @abstractmethod
    async def add_event(self, one: Any, /) -> None: ...

    @abstractmethod
    async def add_turn(self, one: Any, /) -> None: ...

    @abstractmethod
    async def finish(self, leased: Any) -> None: ...

    @abstractmethod
    async def list(self, limit: int) -> int: ...

    @abstractmethod
    async def enqueue_many(self, rollouts: Sequence[Any]) -> None: ...

    @abstractmethod
    async def lease_many(self, count: int) -> Sequence[Any]: ...

    @abstractmethod
    async def add_events(self, many: Sequence[Any], /) -> None: ...

    @abstractmethod
    async def add_turns(self, many: Sequence[Any], /) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...


async def singles(side: Side, callers: int, items: int) -> dict[str, Timing]:
    """Every verb on its own, one thing per call; then whole rollouts, each caller taking one from end to end."""
    timings: dict[str, Timing] = {}
    rollouts = [side.made_rollout(number) for number in range(items)]
    _, timings["enqueue"] = await timed(callers, rollouts, side.enqueue)
    runners = [f"runner-{number % callers}" for number in range(items)]
    leased, timings["lease"] = await timed(callers, runners, side.lease)
    assert len(leased) == items
    assert None not in leased
    _, timings["add_event"] = await timed(callers, [side.made_event(one) for one in leased], side.add_event)
    _, timings["add_turn"] = await timed(callers, [side.made_turn(one) for one in leased], side.add_turn)
    _, timings["finish"] = await timed(callers, leased, side.finish)
    counts, timings["list"] = await timed(callers, [PAGE] * max(items // 8, callers), side.list)
    assert all(min(PAGE, items) <= count <= PAGE for count in counts), counts

    async def whole(rollout: Any) -> None:
        await side.enqueue(rollout)
        mine = await side.lease("runner-0")
        await side.add_event(side.made_event(mine))
        await side.add_turn(side.made_turn(mine))
        await side.finish(mine)

    rollouts = [side.made_rollout(number) for number in range(items // 2)]
    _, timings["whole_rollout"] = await timed(callers, rollouts, whole)
    return timings


async def batches(side: Side, callers: int, items: int) -> dict[str, Timing]:
    """Verbs that take many things at once, `BATCH` per call. Rates are things per second, latencies per call."""
    timings: dict[str, Timing] = {}
    rollouts = parted([side.made_rollout(number) for number in range(items)])
    _, timings["enqueue"] = await timed(callers, rollouts, side.enqueue_many, weight=BATCH)
    pages, timings["lease"] = await timed(callers, [BATCH] * len(rollouts), side.lease_many, weight=BATCH)
    leased = [one for page in pages for one in page]
    assert len(leased) == items
    events = parted([side.made_event(one) for one in leased])
    _, timings["add_event"] = await timed(callers, events, side.add_events, weight=BATCH)
    turns = parted([side.made_turn(one) for one in leased])
    _, timings["add_turn"] = await timed(callers, turns, side.add_turns, weight=BATCH)
    return timings


def parted(things: Sequence[A]) -> list[Sequence[A]]:
    assert len(things) % BATCH == 0
    return [things[begin : begin + BATCH] for begin in range(0, len(things), BATCH)]


def cpu_time() -> float:
    """Seconds that this process and the server have computed. Linux names the clock of another process by its id."""
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in _servers)


async def timed(
    callers: int, arguments: Sequence[A], verb: Callable[[A], Awaitable[R]], *, weight: int = 1
) -> tuple[list[R], Timing]:
    """Call `verb` once per argument, `callers` at a time. The garbage of the verb before is not this one's."""
    gc.collect()
    waiting = iter(arguments)
    results: list[R] = []
    latencies: list[float] = []

    async def caller() -> None:
        for argument in waiting:
            began = time.perf_counter()
            results.append(await verb(argument))
            latencies.append(time.perf_counter() - began)

    began, cpu, all_cpu = time.perf_counter(), time.process_time(), cpu_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds, cpu, all_cpu = time.perf_counter() - began, time.process_time() - cpu, cpu_time() - all_cpu
    cuts = statistics.quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99
    return results, {
        "rate": len(arguments) * weight / seconds,
        "cpu_rate": len(arguments) * weight / cpu,
        "cpu_us": all_cpu / (len(arguments) * weight) * 1e6,
        "p50_ms": cuts[49] * 1000,
        "p99_ms": cuts[98] * 1000,
        "calls": float(len(arguments)),
    }


def answer(open_side: Callable[[dict[str, Any]], Coroutine[Any, Any, Side]]) -> None:
    """Serve laps: a JSON line in says which, a JSON line out says how fast. Ends with standard input.

    `kind` (singles or batches), `callers`, `items` and the server's `pid` are the lap's; the rest of the line is for
    `open_side`.
    """
    import uvloop

    async def run(order: dict[str, Any]) -> dict[str, Timing]:
        _servers[:] = [order["pid"]] if "pid" in order else []
        side = await open_side(order)
        try:
            lap = singles if order["kind"] == "singles" else batches
            await singles(side, 4, 20)  # warm: connections, caches, compiled statements
            return await lap(side, order["callers"], order["items"])
        finally:
            await side.close()

    gc.freeze()  # what was imported is no garbage: the peer's imports are many, and looking through them takes long
    for line in sys.stdin:
        order = json.loads(line)
        runner = asyncio.run if order.get("loop") == "asyncio" else uvloop.run
        print(json.dumps(runner(run(order))), flush=True)
