"""A training run on a Ray cluster: the same `train` as on one machine, with its processes placed by Ray.

    join ──▶ prepare (settings, model) ──▶ probe ──▶ plan ──▶ reserve ──▶ run/loop.train
              ▲                                                           │ a rank or its node is lost: LearnerDied,
              │                                                           │ or out of memory: smaller micro-batches
              └────── again, from the last checkpoint (resume) ◀──────────┘

A lost rank takes the whole group of ranks with it, since each waits for the others: all of it is closed and made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strop.cluster.connection import find_head, import_ray, join_cluster, take_signals_back, watch_head
from strop.cluster.gateways import share_out
from strop.cluster.journal import Journal
from strop.cluster.machines import reserve
from strop.cluster.placing import find_servers
from strop.config import Config, LearnerConfig, changed, resolve_policies
from strop.errors import ConfigError, LearnerDied, RankOutOfMemory
from strop.monitor.console import View
from strop.monitor.summary import Summary
from strop.run.data.prepare import needs_agents
from strop.run.loop import train as train_with
from strop.run.prepare import PreparedPolicy, group_by_process, prepare_run
from strop.run.settings import check_agents
from strop.run.supervise import run_beside


async def train(
    config: Config,
    view: View,
    *,
    resume: bool = False,
    changes: Mapping[str, tuple[Any, Any]] | None = None,
    stop: asyncio.Event | None = None,
) -> Summary:
    """See `strop.run.loop.train`. Where a process that holds weights is lost, the run goes on from its last
    checkpoint."""
    ray = import_ray(config.cluster.address)
    refuse_settings(config)
    groups = await find_groups(config)
    with ExitStack() as stack:
        joining = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, join_cluster(config.cluster.address)))
        try:
            address, which = await asyncio.shield(joining)
            take_signals_back()
            journal, failed, reached = Journal(Path(config.folder), view), 0, 0
            view.plan([which])
            while True:
                machines = None
                try:
                    async with reserve(ray, config, groups, address, journal, view, again=failed > 0) as machines:
                        run = train_with(config, view, resume=resume, changes=changes, stop=stop, machines=machines)
                        return await run_beside(run, watch_head(find_head(ray)))
                except (LearnerDied, RankOutOfMemory) as error:
                    opened = machines.run if machines is not None else None
                    if opened is not None:
                        changes = None  # they are written down by then
                    step = opened.step if opened is not None else 0
                    failed, reached = 1 if step > reached else failed + 1, max(step, reached)
                    why = str(error).partition("; its log")[0].partition(". Fix:")[0]
                    journal.write("died", "learner", why=why)
                    if failed > config.cluster.restarts or (stop is not None and stop.is_set()):
                        raise
                    if isinstance(error, RankOutOfMemory):
                        halved = halve_micro_batches(config)
                        config = changed(config, {key: less for key, (_, less) in halved.items()})
                        changes = {**(changes or {}), **halved}
                begun = (Path(config.folder) / "config.json").exists()
                view.note("the learner is started again" + (", from the run's last checkpoint" if begun else ""))
                resume = begun
        finally:
            await asyncio.gather(joining, return_exceptions=True)  # or else Ray would be joined behind our back


def refuse_settings(config: Config) -> None:
    """What a cluster does not do."""
    check_agents(config)
    if config.cluster.gateways:
        share_out(config)
    if not config.runner.workers and needs_agents(config):
        raise ConfigError(
            "runner.workers is 0, and on a cluster it says how many agents each runner pool has at once. Fix: raise it"
        )


async def find_groups(config: Config) -> list[list[PreparedPolicy]]:
    """Policies by the model that they share, if they do."""
    groups = group_by_process((await prepare_run(config)).policies, train=True)
    find_servers(config, groups, gpus=False)  # refuses what cannot be
    return groups


def halve_micro_batches(config: Config) -> dict[str, tuple[int | None, int]]:
    """The settings, before and after, by which micro-batches have half their size: for ranks of which one ran out of
    memory. Policies that have a size of their own are among them."""
    learners = {"": config.learner}
    for name, own in resolve_policies(config).items():
        given: dict[str, Any] = config.policies.get(name, {}).get("learner", {})
        if given.keys() & {"token_budget", "start_budget"}:
            learners[f"policies.{name}."] = own.learner
    return {f"{where}learner.start_budget": (one.start_budget, halve(one)) for where, one in learners.items()}


def halve(learner: LearnerConfig) -> int:
    return max(1, min(learner.start_budget or learner.token_budget, learner.token_budget) // 2)
