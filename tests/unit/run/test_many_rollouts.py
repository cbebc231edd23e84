"""A run with many rollouts at once: collecting them, and giving them back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.config import RunnerConfig
from strop.run.collect import wait_until_ended
from strop.run.serve import open_store_server
from strop.run.supervise import give_back
from strop.runners.pool import Pool
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task
from tests.unit.run.test_loop import configured, run_over, store

__all__ = ["store"]  # a fixture


class Counted(str):
    """An id that counts how often it is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


async def test_waiting_costs_each_rollout_the_same_however_many_run(store: SqliteStore) -> None:
    run = run_over(store, configured())
    forgotten: list[str] = []
    run.pool = Pool(store, {}, RunnerConfig(workers=0), gateway_url="http://127.0.0.1:1", model="m")
    run.gateway = SimpleNamespace(forget=forgotten.append)  # type: ignore[assignment]
    wanted = [Rollout(id=Counted(f"r{n}"), group="g", member=n, task=Task(id="t"), created=0.0) for n in range(400)]
    told: list[str] = []
    waits = asyncio.create_task(
        wait_until_ended(run, wanted, "collecting", then=lambda news: told.extend(one.id for one in news))
    )
    while not (leases := await store.lease("w", seconds=600, count=400)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    Counted.looks = 0
    for lease in leases[::-1]:  # one by one, so that each of them wakes the run
        await store.finish(lease.rollout.id, 1)
        await asyncio.sleep(0)
    ended = await waits
    assert [rollout.id for rollout in ended] == [rollout.id for rollout in wanted]
    assert {rollout.status for rollout in ended} == {"succeeded"}
    assert sorted(told) == sorted(forgotten) == sorted(rollout.id for rollout in wanted)
    assert Counted.looks < 4 * 400


@pytest.mark.parametrize("done", [True, False])
async def test_all_that_run_elsewhere_are_given_back(tmp_path: Path, done: bool) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    count = 1203  # more than a page of them
    made = [Rollout(id=f"r{n}", group="g", member=n, task=Task(id="t"), created=0.0) for n in range(count)]
    await store.enqueue(made)
    leases = await store.lease("elsewhere", seconds=600, count=count)
    await store.finish(leases[0].rollout.id, 1)
    pool = Pool(store, {}, RunnerConfig(workers=0), gateway_url="http://127.0.0.1:1", model="m")
    async with open_store_server(store) as shared:
        run: Any = SimpleNamespace(store=store, pool=pool, shared=shared)
        await give_back(run, done=done)
    stats = await store.stats()
    assert (stats["running"], stats["queued"], stats["succeeded"]) == (0, count - 1, 1)
    await store.close()
