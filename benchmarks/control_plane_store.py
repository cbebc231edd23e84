"""The store's part of `control_plane.py`: its verbs while many rollouts run, here and over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from gateway_workers import list_children
from machine import measure_reference
from peers.lap import TASK
from peers.processes import our_server, say

from strop.store import rows, transitions
from strop.store.base import Store
from strop.store.remote import HttpStore
from strop.store.sql import SqlStore
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, Lease, Policy, Reward, Rollout, Step, Task

GROUP, POOL, STEP = 8, 64, 512
"""Rollouts of a group; those that a runner pool of the store's part has at once; those of a step."""
CHURN = 1024
"""Rollouts that are queued, leased and finished for a figure."""
CALLERS = 16
Found = dict[str, Any]


def make_rollouts(name: str, count: int, **fields: Any) -> list[Rollout]:
    made: list[Rollout] = []
    for number in range(count):
        group = f"{name}-{number // GROUP:07}"
        task = Task(id=f"task-{number // GROUP}", data=TASK)
        member = number % GROUP
        made.append(Rollout(id=f"{group}.{member}", group=group, member=member, task=task, created=1.0, **fields))
    return made


async def fill(store: SqlStore, ended: int, running: int) -> list[Lease]:
    """Rollouts that have ended, each consumed by a step, and then those that run."""
    await store.put_policy(Policy(name="main", version="1.0", model="m"))
    over = make_rollouts("e", ended, status="succeeded", attempts=1, ended=2.0, rewards=(Reward(value=1.0),))
    for first in range(0, ended, STEP):
        some = over[first : first + STEP]

        def write(db: Any, some: Sequence[Rollout] = some) -> None:
            change = transitions.tick(db, len(some))
            marks = rows.placeholders(rows.ROLLOUT)
            encoded = [(*rows.encode(one), change + n) for n, one in enumerate(some)]
            db.executemany(f"INSERT INTO rollouts ({rows.ROLLOUT}, changed) VALUES ({marks}, ?)", encoded)
            attempts = [
                Attempt(rollout=one.id, number=1, runner="r", key=secrets.token_hex(8), started=1.0, lease_until=9.0)
                for one in some
            ]
            marks = rows.placeholders(rows.ATTEMPT)
            db.executemany(f"INSERT INTO attempts ({rows.ATTEMPT}) VALUES ({marks})", list(map(rows.encode, attempts)))
            db.execute("UPDATE attempts SET ended = 2.0 WHERE ended IS NULL")

        await store._write(write)
        number = first // STEP + 1
        step = Step(lineage=1, number=number, rollouts=[one.id for one in some], metrics={"loss": 1.0}, time=1.0)
        await store.commit_step(step)
    leases: list[Lease] = []
    made = make_rollouts("r", running)
    for first in range(0, running, STEP):
        await store.enqueue(made[first : first + STEP])
        leases += await store.lease("pool", seconds=3600, count=STEP)
    return leases


def read_cpu(pid: int) -> float:
    """Seconds of CPU so far, of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Clock:
    """CPU and wall time of what is asked, of this process and those that it asks."""

    def __init__(self, servers: Callable[[], Sequence[int]], *, mine: bool = True) -> None:
        self._servers, self._mine = servers, mine
        self.found: Found = {}

    def _cpu(self) -> dict[int, float]:
        return {0: time.process_time() if self._mine else 0.0} | {pid: read_cpu(pid) for pid in self._servers()}

    async def time(
        self, name: str, calls: Sequence[Callable[[], Awaitable[Any]]], *, each: int = 1, callers: int = CALLERS
    ) -> list[Any]:
        """Have so many callers make the calls; `each`: rollouts that one call is about. Returns what they gave."""
        given: list[Any] = [None] * len(calls)
        numbers = iter(range(len(calls)))

        async def caller() -> None:
            for number in numbers:
                given[number] = await calls[number]()

        cpu, began = self._cpu(), time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        took, after = time.perf_counter() - began, self._cpu()
        spent = sum(now - cpu.get(pid, 0.0) for pid, now in after.items())  # not of those that have ended
        count = len(calls) * each
        self.found[f"{name}_cpu_us"] = spent / count * 1e6
        self.found[f"{name}_per_second"] = count / took
        return given


async def measure(store: SqlStore, leases: Sequence[Lease], ended: int, servers: Callable[[], Sequence[int]]) -> Found:
    """The verbs that a run's life is made of. All figures are per rollout, but for those of lists, steps and sweeps."""
    clock = Clock(servers)
    refs = [(lease.rollout.id, 1) for lease in leases]
    beats = [refs[first : first + POOL] for first in range(0, len(refs), POOL)]
    laps = -(-5 * CHURN // len(refs))
    calls = [lambda some=some: store.heartbeat(some, seconds=3600) for some in beats] * laps
    await clock.time("heartbeat", calls, each=min(POOL, len(refs)))
    made = make_rollouts("n", CHURN)
    steps = [made[first : first + POOL] for first in range(0, CHURN, POOL)]
    await clock.time("enqueue", [lambda some=some: store.enqueue(some) for some in steps], each=POOL, callers=1)
    lease = [lambda: store.lease("pool", seconds=3600, token=secrets.token_hex(8))] * CHURN
    taken = [one for (one,) in await clock.time("lease", lease)]
    done = [Reward(value=1.0)]
    await clock.time(
        "finish", [lambda one=one: store.finish(one.rollout.id, one.attempt.number, rewards=done) for one in taken]
    )
    groups = [one.rollout.group for one in taken[::4]]
    await clock.time("list_group", [lambda group=group: store.list(group=group) for group in groups], callers=1)
    await clock.time("list_running_100", [lambda: store.list(status="running", limit=100)] * 100, callers=1)
    ids = [one.rollout.id for one in taken]
    number = ended // STEP + 2
    two = [
        Step(lineage=1, number=number + n, rollouts=ids[n * STEP : (n + 1) * STEP], metrics={"loss": 1.0}, time=1.0)
        for n in range(CHURN // STEP)
    ]
    await clock.time(f"commit_step_of_{STEP}", [lambda step=step: store.commit_step(step) for step in two], callers=1)
    await clock.time("reclaim", [store.reclaim] * 50, callers=1)
    await clock.time("stats", [store.stats] * 20, callers=1)
    await clock.time("count_open", [store.count_open] * 20, callers=1)
    return {"running": len(leases), "ended": ended, **clock.found, "reference_ms": measure_reference()}


@asynccontextmanager
async def open_sqlite(folder: Path, name: str) -> AsyncGenerator[SqlStore]:
    store = await SqliteStore.open(folder / f"{name}.sqlite")
    yield store
    await store.close()


def run(folder: Path, sizes: list[int], ended: int) -> Found:
    found: Found = {"callers": CALLERS, "sqlite": {}, "postgresql": {}}
    states = [(running, 0) for running in sizes] + [(sizes[-1], ended)]

    async def go(open_store: Callable[[str], Any], sides: Found, servers: Callable[[], Sequence[int]]) -> None:
        for running, over in states:
            say(f"store: {running:,} running, {over:,} ended")
            name = f"s{running}e{over}"
            async with open_store(name) as store:
                leases = await fill(store, over, running)
            async with open_store(name) as store:  # what was written to fill it has its place in the file by now
                sides[f"{running} running, {over} ended"] = await measure(store, leases, over, servers)

    uvloop.run(go(lambda name: open_sqlite(folder, name), found["sqlite"], lambda: ()))
    from tests.postgres import Server

    server = Server(shared_buffers="256MB")
    try:
        postmaster = int((server.data / "postmaster.pid").read_text().split()[0])

        @asynccontextmanager
        async def open_postgres(name: str) -> AsyncGenerator[SqlStore]:
            from strop.store.postgres import PostgresStore

            store = await PostgresStore.open(server.url(name))
            yield store
            await store.close()

        servers = lambda: [postmaster, *list_children(postmaster)]  # noqa: E731
        uvloop.run(go(open_postgres, found["postgresql"], servers))
    finally:
        server.close()
    return found


# -- over HTTP -------------------------------------------------------------------------------------------------------


async def ask_served(url: str, key: str, pid: int, in_flight: int) -> Found:
    """Runner pools, each with a client of its own, have so many rollouts at work."""
    num_pools = max(2, min(64, in_flight // 50))
    each = in_flight // num_pools
    pools = [await HttpStore.open(url, key) for _ in range(num_pools)]
    clock = Clock(lambda: [pid], mine=False)
    await enqueue(pools[0], make_rollouts(f"s{in_flight}", each * num_pools))
    leased = await asyncio.gather(*(pool.lease("pool", seconds=3600, count=each) for pool in pools))
    refs = [[(lease.rollout.id, 1) for lease in leases] for leases in leased]
    assert [len(one) for one in refs] == [each] * num_pools
    beats = [lambda pool=pool, mine=mine: pool.heartbeat(mine, seconds=3600) for pool, mine in zip(pools, refs)]  # noqa: B905
    await clock.time("heartbeat", beats * -(-20_000 // in_flight), each=each, callers=num_pools)
    await enqueue(pools[0], make_rollouts(f"t{in_flight}", CHURN))

    async def replace(pool: Store, old: Lease) -> None:
        """What a pool does when an agent has ended."""
        await pool.finish(old.rollout.id, old.attempt.number, rewards=[Reward(value=1.0)])
        await pool.lease("pool", seconds=3600, token=secrets.token_hex(8))

    olds = [(pool, lease) for turn in zip(*leased, strict=True) for pool, lease in zip(pools, turn, strict=True)]
    calls = [lambda pool=pool, old=old: replace(pool, old) for pool, old in olds[:CHURN]]
    await clock.time("finish_and_lease", calls, callers=num_pools)
    await ask_waiting(clock, pools, in_flight)
    for pool in pools:
        await pool.close()
    return {"in_flight": in_flight, "pools": num_pools, **clock.found, "reference_ms": measure_reference()}


async def ask_waiting(clock: Clock, pools: Sequence[Store], in_flight: int) -> None:
    """All pools wait for work; groups are queued one after the other."""
    while await pools[0].lease("pool", seconds=3600, count=1000):  # nothing is left in the queue
        pass
    waiting = [asyncio.create_task(_take(pool)) for pool in pools]
    await asyncio.sleep(0.2)
    groups = make_rollouts(f"w{in_flight}", 50 * GROUP)
    some = [groups[first : first + GROUP] for first in range(0, len(groups), GROUP)]
    calls = [lambda group=group: pools[0].enqueue(group) for group in some]
    await clock.time("enqueue_while_all_pools_wait", calls, each=GROUP, callers=1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _take(pool: Store) -> None:
    while True:
        await pool.lease("pool", seconds=3600, count=8, wait=30, token=secrets.token_hex(8))


async def enqueue(store: Store, made: Sequence[Rollout]) -> None:
    for first in range(0, len(made), STEP):
        await store.enqueue(made[first : first + STEP])


def run_served(folder: Path, sizes: list[int]) -> Found:
    found: Found = {"store": "strop serve on SQLite", "served": {}}
    for in_flight in sizes:
        say(f"served: {in_flight:,} in flight")
        with our_server(folder / f"served-{in_flight}") as server:
            side = uvloop.run(ask_served(server["url"], server["key"], server["pid"], in_flight))
        found["served"][f"{in_flight} in flight"] = side
    return found
