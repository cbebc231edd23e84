"""`strop enqueue`: put tasks into a store, to be run by runners."""

from __future__ import annotations

import argparse
import time

import uvloop
from rich.live import Live
from rich.text import Text

from strop import config as configs
from strop.cli.commands import Commands
from strop.cli.output import format_counts, make_console, print_json
from strop.cli.served_store import add_options, open_served
from strop.errors import ConfigError
from strop.monitor.screen import Screen
from strop.store.base import Store
from strop.tasks.load import load
from strop.tasks.sampling import queue
from strop.types import TERMINAL


def add(commands: Commands) -> None:
    enqueue = commands.add_parser("enqueue", help="put tasks into a store, to be run by runners")
    add_options(enqueue)
    enqueue.add_argument("--tasks", required=True, help="a file, a folder, a data set, or FILE.py:function")
    enqueue.add_argument("--split", help="only tasks of this split (default: all)")
    enqueue.add_argument("--members", type=int, default=1, help="rollouts per task (default: 1)")
    enqueue.add_argument("--mode", choices=["train", "eval", "greedy"], default="eval", help="how they sample")
    enqueue.add_argument("--name", help="begins every rollout's id; the same name again queues nothing twice")
    enqueue.add_argument("--config", metavar="TOML", help="settings from a file: runner.retries")
    enqueue.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    enqueue.add_argument("--wait", action="store_true", help="stay until all of them have ended")
    enqueue.add_argument("--json", action="store_true", help="one JSON object")
    enqueue.set_defaults(command=_enqueue)


def _enqueue(arguments: argparse.Namespace) -> int:
    return uvloop.run(_enqueue_all(arguments))


async def _enqueue_all(arguments: argparse.Namespace) -> int:
    config = configs.load(toml=arguments.config, sets=arguments.set, tasks=arguments.tasks)
    if arguments.members < 1:
        raise ConfigError("--members is the number of rollouts per task: at least 1")
    tasks = [task for task in load(config.tasks, **config.tasks_args) if arguments.split in (None, task.split)]
    if not tasks:
        raise ConfigError(f"{arguments.tasks} has no task of split {arguments.split!r}. Fix: leave --split out for all")
    name = arguments.name or time.strftime("q%Y%m%d-%H%M%S")
    rollouts = queue(
        tasks,
        name=name,
        members=arguments.members,
        mode=arguments.mode,
        seed=config.seed,
        retries=config.runner.retries.by_cause(),
    )
    store = await open_served(arguments)
    try:
        new = 0
        for first in range(0, len(rollouts), 1000):
            new += await store.enqueue(rollouts[first : first + 1000])
        if new < len(rollouts) and (await store.get(rollouts[0].id)).task != rollouts[0].task:
            raise ConfigError(f"--name {name} was used for other tasks. Fix: choose another name")
        if not arguments.json:
            there = f"; {len(rollouts) - new} were there already" if new < len(rollouts) else ""
            make_console().print(f"queued {new} rollouts of {len(tasks)} tasks as {name}-*{there}")
        counts = await _wait_for(store, {rollout.id for rollout in rollouts}, arguments) if arguments.wait else {}
    finally:
        await store.close()
    if arguments.json:
        print_json({"name": name, "tasks": len(tasks), "rollouts": len(rollouts), "queued": new, **counts})
    return 1 if counts.get("failed") else 0


async def _wait_for(store: Store, ids: set[str], arguments: argparse.Namespace) -> dict[str, int]:
    counts: dict[str, int] = {}
    cursor = 0
    with Live(console=Screen(stderr=True), transient=True, refresh_per_second=4) as live:
        while ids:
            cursor, changed = await store.wait(cursor, timeout=5.0)
            for rollout in changed:
                if rollout.id in ids and rollout.status in TERMINAL:
                    ids.discard(rollout.id)
                    counts[rollout.status] = counts.get(rollout.status, 0) + 1
            live.update(Text(f"{len(ids)} to go  " + format_counts(counts)))
    if not arguments.json:
        make_console().print(format_counts(counts), highlight=False)
    return counts
