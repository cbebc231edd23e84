"""A run's work beside everything that must stay alive for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from strop.errors import ConfigError, Fenced, StropError
from strop.run.folder import wait_until_gone
from strop.run.outages import tell_of_outages
from strop.run.state import Run
from strop.store.reclaim import reclaim_regularly

T = TypeVar("T")


async def run_with_agents(run: Run, main: Coroutine[Any, Any, T]) -> T:
    """The result of `main` while agents are at work and every part of the run is watched. Agents that are at work when
    it ends are given back to the queue, here and elsewhere."""
    run.pool.work()
    if run.shared is not None:
        run.shared.let_in()
    lease = run.config.runner.lease
    reclaim, gone = reclaim_regularly(run.store, lease / 2, grace=lease), wait_until_gone(run.folder.path)
    processes = [learner.watch() for learner in run.learners]
    if run.gateway.workers is not None:
        processes.append(run.gateway.workers.watch())
    watches = stop_if_unclaimed(run), run.machines.watch(run), tell_of_outages(run.engines, run.store)
    done = False
    try:
        result = await run_beside(main, *processes, run.pool.watch(), *watches, reclaim, gone)
        done = run.finished and not run.stop.is_set()
        return result
    finally:
        await give_back(run, done=done)


async def give_back(run: Run, *, done: bool) -> None:
    """Nothing stays `running` that nobody will hear of."""
    if run.shared is not None:
        run.shared.end(done=done)
    with suppress(StropError):  # it may be the store that ends the run
        await run.pool.drain(0.0)
        while run.shared is not None and (page := await run.store.list(status="running")):
            for rollout in page:
                with suppress(Fenced):  # it has ended meanwhile
                    why = "the run ended while it was running"
                    await run.store.finish(rollout.id, rollout.attempts, cause="interrupted", detail=why)


async def stop_if_unclaimed(run: Run) -> None:
    """Raises once an agent calls that no policy answers for, before the first step: the settings are wrong. Later it is
    a rollout that failed."""
    await run.gateway.routes.missed.wait()
    if run.step == 0:
        raise ConfigError(run.gateway.routes.unclaimed)
    await asyncio.Event().wait()


async def run_beside(main: Coroutine[Any, Any, T], *watches: Coroutine[Any, Any, None]) -> T:
    """The result of `main`, unless one of `watches` raises first: then that, with `main` cancelled."""
    first = asyncio.create_task(main)
    tasks: list[asyncio.Task[Any]] = [first, *map(asyncio.create_task, watches)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in reversed(tasks):  # a watch that raised says why main may have failed too
            if task in done:
                task.result()
        return first.result()
    finally:
        await cancel_all(*tasks)


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Nothing of them goes on, whatever they were at."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
