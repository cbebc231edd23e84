"""Starting the next step's agents while the learner works, where rollouts wait for the learner (loop.start_ahead).

    learner    ──────── update, commit, publish ────────┐
    agents     queued, leased, started, first model call │ answered by the new version
                                                         └ engines go on

Engines are paused already: what agents ask before the new version is served waits in front of them, so every token is
that version's. Rollouts that were queued for a step whose predecessor was never committed are cancelled when the run is
resumed, and counted as superseded; the resumed lineage queues its own (resume.py).

Left out: where the next groups are not known yet (loop.max_groups, a lineage that may make a superseded step's weights
again), where something else comes first (an evaluation, opponents that are loaded anew), where runners on other
machines may join, which do not know when the model is paused and would count that as the agents' time, and where agents
would wait for so long that their clients might give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from strop.run.state import Run
from strop.run.supervise import cancel_all


@asynccontextmanager
async def starting_ahead(run: Run) -> AsyncGenerator[None]:
    """Queue the rollouts of the step behind the one that is being made, if they may start by now, once this process has
    to wait for the learner. Their agents' time counts from the end of the pause (`Pool.go_on`)."""
    queueing = asyncio.create_task(start_ahead(run))
    try:
        yield
        await queueing
    finally:
        await cancel_all(queueing)


async def start_ahead(run: Run) -> None:
    if may_start_ahead(run):
        run.pool.stop_clock()
        await run.store.enqueue(run.next_rollouts(origin=run.lineage, skip=run.config.loop.groups))


def may_start_ahead(run: Run) -> bool:
    loop, number = run.config.loop, run.step + 1
    return (
        not run.overlaps
        and not run.config.runner.remote
        and find_learning_seconds(run) <= loop.start_ahead > 0
        and number < loop.steps
        and not run.stop.is_set()
        and not (loop.eval_splits and run.is_evaluated(number))
        and loop.max_groups is None
        and run.data is None
        and not run.opponents
        and all(step.number != number for step in run.superseded)
    )


def find_learning_seconds(run: Run) -> float:
    """How long agents would have waited in the step before."""
    if not run.steps:
        return float("inf")
    metrics = run.steps[-1].metrics
    return metrics["timing_s/step"] - metrics["timing_s/gen"]
