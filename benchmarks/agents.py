"""What it costs to run agents: CPU milliseconds of a rollout by where they go, and how long a step's rollouts take.

    python benchmarks/agents.py [--sizes 64 256] [--runs 3] [--json FILE]
    python benchmarks/agents.py --against ../other/checkout      both in turns, in one run

A real gateway, SQLite store and pool in one process, as in `strop train`, with an engine that answers at once; agents
of two turns (peers/two_turns.py), as many at once as there are rollouts. The first step, with every worker's first
rollout, is reported apart; later steps give the medians.

    boot      once: the process that workers are forked from, with what it imports, and its forks
    start     of a worker, once: its part in the fork, importing the agent (`import`), and what the runner does for it
    workers   of a rollout, in the processes that run agents; `client` is making the client and `requests` its use
    runner    of a rollout, in the process of gateway and store: `lease`, `run` (handing a job over and hearing what
              came of it), `finish`, `gateway` (two requests), and `other`, the store's own thread among it
    wall      seconds from queueing a step's rollouts to the end of the last

Where agents share a process (`loops`), client and requests of one cannot be told from those of others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

from machine import hardware

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).resolve().parent / "peers"
RESULTS = ROOT / "benchmarks" / "results"
MODES = {
    "processes": ("agent", {}),
    "processes, async": ("agent_async", {}),
    "processes, own client": ("own", {}),
    "loops": ("agent_async", {"agents_in": "loops"}),
    "loops, own client": ("own_async", {"agents_in": "loops"}),
}
NEW = {"loops": "processes, async", "loops, own client": "processes, own client"}
"""Those that an older checkout may not have, and what they are compared with there."""
STEPS = 4
Found = dict[str, Any]

# -- one run, in a process of its own ----------------------------------------------------------------------------------


class Spent:
    """CPU milliseconds of the event loop's thread, by what it was doing."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def count(self, name: str, function: Any) -> Any:
        """The same coroutine function, timed each time that it is gone on with."""

        async def timed(*given: Any, **named: Any) -> Any:
            return await _Timed(function(*given, **named), self.ms, name)

        return timed


class _Timed:
    def __init__(self, work: Coroutine[Any, Any, Any], ms: dict[str, float], name: str) -> None:
        self._work, self._ms, self._name = work, ms, name

    def __await__(self) -> Generator[Any, Any, Any]:
        give: Any = None
        step = self._work.send
        while True:
            start = time.thread_time()
            try:
                waits = step(give)
            except StopIteration as done:
                return done.value
            finally:
                self._ms[self._name] = self._ms.get(self._name, 0.0) + 1e3 * (time.thread_time() - start)
            try:
                give, step = (yield waits), self._work.send
            except BaseException as error:
                give, step = error, self._work.throw


def descendants() -> dict[int, float]:
    """CPU milliseconds so far of every process below this one."""
    return {pid: _on_cpu(pid) for pid in _find_below(os.getpid())}


def _find_below(top: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = {top}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {top}


def _on_cpu(pid: int) -> float:
    nanoseconds = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            nanoseconds += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return nanoseconds / 1e6


async def measure(folder: Path, mode: str, size: int) -> Found:
    sys.path.insert(0, str(PEERS))
    from gateway_strop import Instant

    from strop.config import RunnerConfig
    from strop.gateway.app import Gateway
    from strop.gateway.route import PolicyRoute, Routes
    from strop.gateway.template import Renderer
    from strop.models.names import SHIPPED
    from strop.net.server import serve
    from strop.runners.pool import Pool
    from strop.store.sqlite import SqliteStore
    from strop.types import Sampling

    renderer = Renderer.from_folder(SHIPPED["strop/nano"])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 37, "b": 85}}\n</tool_call>'
    engine = Instant([*renderer.encode(call), renderer.end_of_turn])
    sampling = Sampling(max_tokens=64)
    route = PolicyRoute(policy="main", model="m", engine=engine, renderer=renderer, sampling_for=lambda _: sampling)
    store, spent = await SqliteStore.open(folder / "store.sqlite"), Spent()
    server = await serve(spent.count("gateway", Gateway(store, Routes({"*": route}))))
    name, settings = MODES[mode]
    config = RunnerConfig(workers=size, timeout=600.0, **settings)
    pool = Pool(store, {None: f"{PEERS}/two_turns.py:{name}"}, config, gateway_url=server.url, model="m")
    try:
        before = time.process_time()
        await pool.start()
        own, started = 1e3 * (time.process_time() - before), descendants()
        leaves = [pid for pid in started if not _find_below(pid)]  # the workers, and one that watches over them
        of_workers = sum(started[pid] for pid in leaves)
        found: Found = {"boot": sum(started.values()) - of_workers}
        found["start"] = (of_workers + own) / (len(leaves) - 1)
        for verb in ("lease", "finish"):
            setattr(store, verb, spent.count(verb, getattr(store, verb)))
        for agent in pool._agents.values():  # pyright: ignore[reportPrivateUsage]
            agent.run = spent.count("run", agent.run)
        pool.work()
        steps = [await step(store, number, size, spent) for number in range(STEPS)]
    finally:
        await pool.close()
        await server.close()
        await store.close()
    first, later = steps[0], steps[1:]
    found |= {"first": first, "later": {key: statistics.median(s[key] for s in later) for key in first}}
    return found


async def step(store: Any, number: int, size: int, spent: Spent) -> dict[str, float]:
    """One step's rollouts, to their end: CPU milliseconds of one of them by part, and the seconds all took."""
    from strop.types import Rollout, Task

    task = Task(id="sum", data={"question": "What is 37 + 85?"})
    group = f"g{number}"
    made = [Rollout(id=f"{group}.{n}", group=group, member=n, task=task, created=0.0) for n in range(size)]
    spent.ms.clear()
    cursor, _ = await store.wait(0, timeout=0)
    below, own, since = descendants(), time.process_time(), time.monotonic()
    await store.enqueue(made)
    waiting, done = {one.id for one in made}, []
    while waiting:
        cursor, changed = await store.wait(cursor, timeout=30)
        ended = [one for one in changed if one.ended and one.id in waiting]
        waiting -= {one.id for one in ended}
        done += ended
    wall, own = time.monotonic() - since, time.process_time() - own
    failed = [one.detail for one in done if one.cause]
    assert not failed, failed[0]
    after = descendants()
    workers = sum(ms - below.get(pid, 0.0) for pid, ms in after.items())
    rewards = [{reward.name: reward.value for reward in one.rewards} for one in done]
    mean = {key: statistics.mean(one[key] for one in rewards) for key in ("import", "client", "requests")}
    parts = {key: spent.ms.get(key, 0.0) / size for key in ("lease", "run", "finish", "gateway")}
    other = 1e3 * own / size - sum(parts.values())
    total = workers / size + 1e3 * own / size
    return {"wall": wall, "total": total, "workers": workers / size, **mean, **parts, "other": other}


# -- all runs ----------------------------------------------------------------------------------------------------------


def run(checkout: Path, mode: str, size: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="strop-agents-") as folder:
        command = [sys.executable, __file__, "--child", folder, "--modes", mode, "--sizes", str(size)]
        env = os.environ | {"PYTHONPATH": str(checkout / "src")}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)


def figures(runs: list[Found]) -> Found:
    """Medians over runs."""
    first = {key: statistics.median(one["first"][key] for one in runs) for key in runs[0]["first"]}
    later = {key: statistics.median(one["later"][key] for one in runs) for key in runs[0]["later"]}
    once = {key: statistics.median(one[key] for one in runs) for key in ("boot", "start")}
    return {**once, "first": first, "later": later}


def show(title: str, found: Found) -> None:
    columns = ("wall", "total", "workers", "client", "requests", "lease", "run", "finish", "gateway", "other")
    once = f"boot {found['boot']:.0f} ms, start {found['start']:.2f} ms a worker"
    print(f"{title}: {once}, import {found['first']['import']:.2f} of it")
    print("           " + "".join(f"{name:>10}" for name in columns))
    for when in ("first", "later"):
        print(f"  {when:<9}" + "".join(f"{found[when][name]:>10.2f}" for name in columns))


def compare(old: list[Found], new: list[Found]) -> dict[str, float]:
    """How many times as much the old code took, the median of neighbouring runs."""

    def ratio(read: Any) -> float:
        return statistics.median(read(a) / read(b) for a, b in zip(old, new, strict=True))

    found: dict[str, float] = {}
    for when in ("first", "later"):
        for part in ("total", "workers", "wall"):
            found[f"{when} {part}"] = ratio(lambda one, when=when, part=part: one[when][part])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="rollouts of a step")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--runs", type=int, default=3, help="of each code (default 3)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another copy of this repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        import uvloop

        return print(json.dumps(uvloop.run(measure(given.child, given.modes[0], given.sizes[0]))))
    before = hardware()
    sides = {"this": ROOT} | ({"other": given.against.resolve()} if given.against else {})
    found: Found = {}
    for size in given.sizes:
        runs: dict[tuple[str, str], list[Found]] = {}
        for number in range(given.runs):
            for mode in given.modes:
                for side in list(sides)[:: 1 if number % 2 else -1]:
                    if side == "this" or mode not in NEW:
                        runs.setdefault((mode, side), []).append(run(sides[side], mode, size))
        for (mode, side), of in runs.items():
            place = found.setdefault(str(size), {}).setdefault(mode, {})
            place[side] = figures(of)
            show(f"{size} rollouts, {mode}, {side}", place[side])
        for mode in given.modes if given.against else ():
            old: str = NEW.get(mode, mode)
            if (old, "other") in runs:
                ratios = compare(runs[old, "other"], runs[mode, "this"])
                found[str(size)][mode]["ratio"] = ratios
                print(f"{size} rollouts, {mode}: " + ", ".join(f"{name} {x:.2f}x less" for name, x in ratios.items()))
    if given.json:
        about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": before}
        about |= {"python": platform.python_version(), "imports": os.environ.get("STROP_BENCHMARK_IMPORT", "")}
        given.json.write_text(json.dumps(about | {"runs": given.runs, "rollouts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
