"""What it costs to run agents: CPU milliseconds of a rollout by where they go, and how long a step's rollouts take.

    python benchmarks/agents.py [--sizes 64 256] [--runs 3] [--json FILE]
    python benchmarks/agents.py --against ../other/checkout      both in turns, in one run
    python benchmarks/agents.py --profile FILE ...               the run's event loop in the last step, for pstats

A real gateway, SQLite store and pool in one process, and `collect` on top of them, as in `strop train`, with an engine
that answers at once; agents of two turns (peers/two_turns.py), as many at once as there are rollouts. With `gateway
workers` the gateway is in four processes of its own, and the engine stays where the store is. The first step, with
every worker's first rollout, is reported apart; later steps give the medians.

    boot      once: the process that workers are forked from, with what it imports, and its forks
    start     of a worker, once: its part in the fork, importing the agent (`import`), and what the runner does for it
    workers   of a rollout, in the processes that run agents; `client` is making the client and `requests` its use
    owner     of a rollout, in the process of loop and store, in all and by part: `enqueue`, `lease`, `run` (handing a
              job over and hearing what came of it), `finish`, `wait` (hearing of what changed), `read` (turns of what
              ended), `record` (turns, written), `commit` (of the step), `gateway` (two requests, or where it has
              workers, looking up attempts and passing tokens on), and `other`
    wall      seconds from queueing a step's rollouts to the end of the last

Where agents share a process (`loops`), client and requests of one cannot be told from those of others.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
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
    "processes, gateway workers": ("agent", {}),
}
NEW = {"loops": "processes, async", "loops, own client": "processes, own client"}
"""Those that an older checkout may not have, and what they are compared with there."""
STEPS = 4
NUM_WORKERS = 4
"""Processes of a gateway that has some."""
VERBS = {
    "enqueue": "enqueue",
    "lease": "lease",
    "finish": "finish",
    "wait": "wait",
    "turns": "read",
    "turns_of": "read",
    "add_turns": "record",
    "add_encoded": "record",
    "commit_step": "commit",
    "attempts": "gateway",
    "get": "gateway",
    "list": "wait",
}
"""The store's verbs, and the part that each is."""
PARTS = ("enqueue", "lease", "run", "finish", "wait", "read", "record", "commit", "gateway")
Found = dict[str, Any]

# -- one run, in a process of its own ----------------------------------------------------------------------------------


class Spent:
    """CPU milliseconds by part of the work, of whichever thread does it; nothing where it is `off`."""

    def __init__(self, *, off: bool) -> None:
        self._off = off
        self.ms: dict[str, float] = {}
        self._part: ContextVar[str] = ContextVar("part", default="other")

    def count(self, name: str, function: Any) -> Any:
        """The same coroutine function, timed each time that it is gone on with."""

        async def timed(*given: Any, **named: Any) -> Any:
            self._part.set(name)
            return await _Timed(function(*given, **named), self.ms, name)

        return function if self._off else timed

    def count_operations(self, function: Any) -> Any:
        """The same way to the database, with what is done there timed as part of the verb that wants it."""

        async def timed(operation: Any) -> Any:
            name = self._part.get()

            def timed_operation(db: Any) -> Any:
                start = time.thread_time()
                try:
                    return operation(db)
                finally:
                    self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.thread_time() - start)

            return await function(timed_operation)

        return function if self._off else timed


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


async def measure(folder: Path, mode: str, size: int, profile: Path | None) -> Found:
    sys.path.insert(0, str(PEERS))
    from gateway_strop import Instant, make_routes, open_workers

    from strop.config import RunnerConfig
    from strop.gateway import relay
    from strop.gateway.app import Gateway
    from strop.gateway.template import Renderer
    from strop.models.names import SHIPPED
    from strop.net.server import serve
    from strop.runners.pool import Pool
    from strop.store.sqlite import SqliteStore
    from strop.types import Policy

    model = SHIPPED["strop/nano"]
    renderer = Renderer.from_folder(model)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 37, "b": 85}}\n</tool_call>'
    engine = Instant([*renderer.encode(call), renderer.end_of_turn])
    store, spent = await SqliteStore.open(folder / "store.sqlite"), Spent(off=profile is not None)
    await store.put_policy(Policy(name="main", version="1.0", model="m"))
    for way in ("_write", "_read"):  # what is looked up at once is timed with its verb
        setattr(store, way, spent.count_operations(getattr(store, way)))
    for verb, part in VERBS.items():
        if hasattr(store, verb):  # older checkouts have fewer
            setattr(store, verb, spent.count(part, getattr(store, verb)))
    gateway, workers = Gateway(store, make_routes(engine, renderer)), None
    if "gateway workers" in mode:
        one = relay.TokenRequests
        one._generate = spent.count("gateway", one._generate)  # pyright: ignore[reportPrivateUsage]
        workers = open_workers(gateway, store, engine, NUM_WORKERS, (model, ([], 0, 0.0, 1), True))
    server = await serve(spent.count("gateway", gateway), switch=workers)
    if workers is not None:
        await workers.open()
    name, settings = MODES[mode]
    config = RunnerConfig(workers=size, timeout=600.0, **settings)
    pool = Pool(store, {None: f"{PEERS}/two_turns.py:{name}"}, config, gateway_url=server.url, model="m")
    try:
        already, before = descendants(), time.process_time()
        await pool.start()
        own, started = 1e3 * (time.process_time() - before), descendants()
        started = {pid: ms for pid, ms in started.items() if pid not in already}
        leaves = [pid for pid in started if not _find_below(pid)]  # the workers, and one that watches over them
        of_workers = sum(started[pid] for pid in leaves)
        found: Found = {"boot": sum(started.values()) - of_workers}
        found["start"] = (of_workers + own) / (len(leaves) - 1)
        for agent in pool._agents.values():  # pyright: ignore[reportPrivateUsage]
            agent.run = spent.count("run", agent.run)
        pool.work()
        run, of = make_run(store, gateway, pool, size), {*started}
        steps = [await step(run, spent, of, profile if last else None) for last in (*[False] * (STEPS - 1), True)]
    finally:
        await pool.close()
        if workers is not None:
            await workers.close()
        await server.close()
        await store.close()
    first, later = steps[0], steps[1:]
    found |= {"first": first, "later": {key: statistics.median(s[key] for s in later) for key in first}}
    return found


def make_run(store: Any, gateway: Any, pool: Any, size: int) -> Any:
    """A run as far as collecting needs one: groups of 8, as in benchmarks/train.py."""
    from strop.config import Config
    from strop.config.run import LoopConfig
    from strop.monitor.console import Silent
    from strop.run.state import Run
    from strop.types import Task

    nothing: Any = None
    config = Config(loop=LoopConfig(steps=STEPS, groups=size // 8, group_size=8))
    return Run(
        config=config,
        folder=nothing,
        tasks=[Task(id="sum", data={"question": "What is 37 + 85?"})],
        view=Silent(),
        store=store,
        policies={},
        engines=[],
        learners=[],
        gateway=gateway,
        pool=pool,
        writers=nothing,
    )


async def step(run: Any, spent: Spent, runners: set[int], profile: Path | None) -> dict[str, float]:
    """One step's rollouts, to its commit: CPU milliseconds of one of them by part, and the seconds all took."""
    from strop.run.collect import collect
    from strop.types import Step

    spent.ms.clear()
    profiler = cProfile.Profile(time.thread_time) if profile else None
    below, own, since = descendants(), time.process_time(), time.monotonic()
    if profiler:
        profiler.enable()
    samples = (await collect(run)).samples
    done = [sample.rollout for sample in samples]
    made = Step(lineage=1, number=run.step + 1, rollouts=[one.id for one in done], metrics={}, time=time.time())
    await run.store.commit_step(made)
    if profiler and profile:
        profiler.disable()
        profiler.dump_stats(profile)
    wall, own = time.monotonic() - since, time.process_time() - own
    run.step += 1
    run.steps.append(made)
    failed = [one.detail for one in done if one.cause]
    assert not failed, failed[0]
    size, after = len(done), descendants()
    workers = sum(ms - below.get(pid, 0.0) for pid, ms in after.items() if pid in runners)
    gateways = sum(ms - below.get(pid, 0.0) for pid, ms in after.items() if pid not in runners)
    rewards = [{reward.name: reward.value for reward in one.rewards} for one in done]
    mean = {key: statistics.mean(one[key] for one in rewards) for key in ("import", "client", "requests")}
    parts = {key: spent.ms.get(key, 0.0) / size for key in PARTS}
    owner = 1e3 * own / size
    found = {"wall": wall, "total": (workers + gateways) / size + owner, "workers": workers / size, **mean}
    return found | {"gateways": gateways / size, "owner": owner, **parts, "other": owner - sum(parts.values())}


# -- all runs ----------------------------------------------------------------------------------------------------------


def run(checkout: Path, mode: str, size: int, profile: Path | None) -> Found:
    with tempfile.TemporaryDirectory(prefix="strop-agents-") as folder:
        command = [sys.executable, __file__, "--child", folder, "--modes", mode, "--sizes", str(size)]
        command += ["--profile", str(profile)] if profile else []
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
    columns = ("wall", "total", "workers", "client", "requests", "gateways", "owner", *PARTS, "other")
    once = f"boot {found['boot']:.0f} ms, start {found['start']:.2f} ms a worker"
    print(f"{title}: {once}, import {found['first']['import']:.2f} of it")
    print("           " + "".join(f"{name:>9}" for name in columns))
    for when in ("first", "later"):
        print(f"  {when:<9}" + "".join(f"{found[when][name]:>9.2f}" for name in columns))


def compare(old: list[Found], new: list[Found]) -> dict[str, float]:
    """How many times as much the old code took, the median of neighbouring runs."""

    def ratio(read: Any) -> float:
        return statistics.median(read(a) / read(b) for a, b in zip(old, new, strict=True))

    found: dict[str, float] = {}
    for when in ("first", "later"):
        for part in ("total", "workers", "owner", "wall"):
            found[f"{when} {part}"] = ratio(lambda one, when=when, part=part: one[when][part])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="rollouts of a step")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--runs", type=int, default=3, help="of each code (default 3)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another copy of this repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="where the last step's profile goes")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        import uvloop

        return print(json.dumps(uvloop.run(measure(given.child, given.modes[0], given.sizes[0], given.profile))))
    before = hardware()
    sides = {"this": ROOT} | ({"other": given.against.resolve()} if given.against else {})
    found: Found = {}
    for size in given.sizes:
        runs: dict[tuple[str, str], list[Found]] = {}
        for number in range(given.runs):
            for mode in given.modes:
                for side in list(sides)[:: 1 if number % 2 else -1]:
                    if side == "this" or mode not in NEW:
                        runs.setdefault((mode, side), []).append(run(sides[side], mode, size, given.profile))
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
