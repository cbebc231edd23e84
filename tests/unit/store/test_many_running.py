"""Many rollouts at once: what a verb does does not grow with those that it has nothing to do with."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.store import transitions
from strop.store.base import Store
from strop.store.sqlite import SqliteStore
from strop.store.transitions import MANY, Cursor, Db
from strop.types import Rollout, Task


async def begin(store: Store, count: int) -> list[tuple[str, int]]:
    """So many rollouts that run."""
    made = [Rollout(id=f"r{n:04}", group="g", member=n, task=Task(id="t"), created=0.0) for n in range(count)]
    await store.enqueue(made)
    leases = await store.lease("runner", seconds=600, count=count)
    return [(lease.rollout.id, lease.attempt.number) for lease in leases]


async def test_a_heartbeat_of_many_names_just_those_that_are_over(store: Store) -> None:
    running = await begin(store, 2 * MANY + 3)
    over = [running[0], running[MANY - 1], running[MANY], running[-1]]
    for rollout, number in over[:3]:
        await store.finish(rollout, number)
    await store.cancel([over[3][0]], detail="not wanted")
    unknown = [("nobody", 1), (running[5][0], 2)]
    asked = [*running, *unknown, running[7]]
    began = time.time()
    assert sorted(await store.heartbeat(asked[::-1], seconds=3000)) == sorted([*over, *unknown])
    kept = [await store.attempts(running[n][0]) for n in (5, 7, MANY + 1)]
    assert all(one.lease_until > began + 2000 for (one,) in kept)
    ((ended,),) = [await store.attempts(over[0][0])]
    assert ended.lease_until < began + 2000


class Counted:
    """A connection that counts how often something is asked of it: over a network each time costs a way there and
    back."""

    changed = queued = False
    lock = skip = ""

    def __init__(self, db: Db) -> None:
        self._db, self.asked = db, 0

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        self.asked += 1
        return self._db.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> Cursor:
        self.asked += 1
        return self._db.executemany(sql, parameters)

    def alone(self, name: str, /) -> None: ...


async def test_a_heartbeat_goes_to_the_database_once(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    running = await begin(store, 2 * MANY)
    counted = Counted(store._db)
    assert transitions.prolong(counted, running, 1.0) == []
    assert counted.asked == 1
    await store.finish(*running[3])
    assert transitions.prolong(counted, running, 1.0) == [running[3]]
    assert counted.asked == 4  # and to look for it
    await store.close()


async def test_leases_that_ran_out_are_found_without_reading_those_that_run(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await begin(store, 10)
    said = list[str]()
    store._db.set_trace_callback(said.append)
    assert await store.reclaim() == []
    store._db.set_trace_callback(None)
    (query,) = [one for one in said if one.startswith("SELECT")]
    plan = [step[3] for step in store._db.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()]
    assert any("attempts_running" in step for step in plan)
    assert not any("rollouts_status" in step or "SCAN" in step for step in plan)
    await store.close()
