"""`strop serve`, `strop enqueue`, `strop runner`: a store that machines share, tasks put into it, agents run on it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop
from rich.live import Live
from rich.text import Text

from strop import config as configs
from strop import demo
from strop.cli import keys
from strop.cli.output import HOSTS, MODELS, console, json_line, me, without_password
from strop.config import Config
from strop.errors import ConfigError, StropError
from strop.monitor.screen import Screen
from strop.net.secrets import hide_keys
from strop.runners.pool import Pool
from strop.store.base import Store
from strop.store.opening import open_store
from strop.tasks.load import load
from strop.tasks.sampling import queue
from strop.types import TERMINAL

PORT = 8640
PATIENCE = 60.0
"""Seconds that a server which does not answer yet is waited for by what is to run for long."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="serve a store, and a model, to runners on this or other machines")
    serve.add_argument("--folder", default="runs/served", help="where it is kept (default: runs/served)")
    serve.add_argument("--store", default="", metavar="URL", help="postgresql://...; default: SQLite in the folder")
    serve.add_argument("--model", help=f"serve this model to agents as well: {MODELS}")
    serve.add_argument("--config", metavar="TOML", help="settings from a file: policy, engine, gateway")
    serve.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=PORT, help=f"port to listen on (default: {PORT}; 0: a free one)")
    serve.add_argument("--hosts", action="append", default=[], metavar="NAME", help=HOSTS)
    keys.add(serve, default="$STROP_KEY, or the folder's, made if it has none")
    serve.add_argument("--synchronous", choices=["NORMAL", "FULL"], default="NORMAL", help="FULL survives power loss")
    serve.add_argument(
        "--grace", type=float, default=10.0, metavar="S", help="seconds for runners to be heard of after a start (10)"
    )
    serve.add_argument("--json", action="store_true", help="say where it is as one JSON object")
    serve.set_defaults(command=_serve)

    enqueue = commands.add_parser("enqueue", help="put tasks into a store, to be run by runners")
    _address(enqueue)
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

    runner = commands.add_parser("runner", help="run an agent on what a store has queued")
    _address(runner)
    runner.add_argument("--agent", help="FILE.py:function, package.module:function, a command, or a service's URL")
    runner.add_argument("--reward", metavar="FILE.py:function", help="turns (task, answer) into rewards")
    runner.add_argument("--workers", type=int, help="agents at work at once (default: 16)")
    runner.add_argument("--model", help="what agents are told to ask for (default: the store's policy)")
    runner.add_argument("--name", help="what this runner is called (default: host and process)")
    runner.add_argument("--config", metavar="TOML", help="settings from a file: agent, agents, reward, runner")
    runner.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    runner.add_argument("--until-empty", action="store_true", help="end when nothing is queued or running any more")
    runner.add_argument("--log", metavar="FILE", help="what agents' processes print outside rollouts")
    runner.add_argument("--json", action="store_true", help="print the counts as JSON at the end and nothing else")
    runner.set_defaults(command=_runner)


def _address(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=os.environ.get("STROP_URL"), help="where `strop serve` is (default: $STROP_URL)"
    )
    keys.add(command)


async def _open(arguments: argparse.Namespace, patience: float = 0.0) -> Store:
    if not arguments.url:
        raise ConfigError(f"where is the store? --url http://127.0.0.1:{PORT}, as `strop serve` says (or $STROP_URL)")
    if re.fullmatch(r"[\w.-]+:\d+", arguments.url):
        raise ConfigError(f"--url {arguments.url} has no http:// before it: did you mean http://{arguments.url}?")
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError("--url is the address of `strop serve`, http://...: serve the folder or database there first")
    return await open_store(
        arguments.url, key=keys.key_of(arguments), patience=patience, on_wait=_waiting(arguments.url, arguments.json)
    )


def _waiting(what: str, json: bool) -> Callable[[StropError], None]:
    """Says once what is waited for."""

    def say(why: StropError) -> None:
        if not json:
            print(f"waiting for {what}", file=sys.stderr)

    return say


# -- serve -------------------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    from strop.run import serve

    if arguments.store and not arguments.store.startswith(("postgresql://", "postgres://")):
        raise ConfigError(f"--store {without_password(arguments.store)!r} is no postgresql://USER@HOST/DATABASE")

    model = _model(arguments)
    if model and not arguments.json:
        print(f"loading {model.policy.model}", file=sys.stderr)

    def ready(url: str, key: str) -> None:
        if arguments.json:
            said = {"url": url, "key": key, "pid": os.getpid()}
            return json_line(said | ({"model": model.policy.model} if model else {}))
        where = without_password(arguments.store) or f"{arguments.folder}/store.sqlite"
        where += f" and {model.policy.model}" if model else ""
        out = console()
        out.print(f"[bold]serving[/] {where} at [bold]{url}[/]; Ctrl-C ends it", soft_wrap=True)
        out.print(f"  export STROP_URL={url}\n  export STROP_KEY={key}", soft_wrap=True, markup=False)
        next_steps = {
            f"{me()} enqueue --tasks tasks.jsonl": "queue tasks",
            f"{me()} runner --agent agent.py:agent": "run an agent on them, on as many machines as you like",
            f"{me()} rollouts": "look at what came of them",
        }
        if model:
            ask = f'curl {url}/v1/chat/completions -H "Authorization: Bearer $STROP_KEY" -d '
            ask += shlex.quote(json.dumps(_example(model.policy.model)))
            out.print(Text.assemble("  ", (ask, "cyan")), soft_wrap=True)
        width = max(map(len, next_steps))
        for line, what in next_steps.items():
            out.print(Text.assemble("  ", (line.ljust(width), "cyan"), f"  {what}"), soft_wrap=True)

    uvloop.run(
        serve.main(
            Path(arguments.folder),
            store_url=arguments.store,
            model=model,
            host=arguments.host,
            port=arguments.port,
            hosts=[*arguments.hosts, *(model.gateway.hosts if model else ())],
            key=keys.key_of(arguments),
            synchronous=arguments.synchronous,
            grace=arguments.grace,
            on_ready=ready,
            patience=PATIENCE,
            on_wait=_waiting(without_password(arguments.store), arguments.json),
        )
    )
    return 0


def _example(model: str) -> dict[str, Any]:
    """A request to begin with. The model in the box knows nothing but its calculator."""
    if model != demo.config().policy.model:
        return {"messages": [{"role": "user", "content": "Hello"}]}
    asked = [{"role": "user", "content": "Use the calculator: 12 + 30."}]
    return {"temperature": 0, "messages": asked, "tools": demo.TOOLS}


def _model(arguments: argparse.Namespace) -> Config | None:
    """What is served beside the store, if anything is."""
    if not arguments.model and not arguments.config:
        if arguments.set:
            raise ConfigError("--set says how a model is served: say which with --model")
        return None
    from strop.run.runtime import settled

    policy = {"model": arguments.model} if arguments.model else None
    return settled(configs.load(toml=arguments.config, sets=arguments.set, policy=policy))


# -- enqueue -----------------------------------------------------------------------------------------------------------


def _enqueue(arguments: argparse.Namespace) -> int:
    return uvloop.run(_enqueue_all(arguments))


async def _enqueue_all(arguments: argparse.Namespace) -> int:
    config = configs.load(toml=arguments.config, sets=arguments.set, tasks=arguments.tasks)
    if arguments.members < 1:
        raise ConfigError("--members is the number of rollouts per task: at least 1")
    tasks = [task for task in load(config.tasks, **config.tasks_args) if arguments.split in (None, task.split)]
    if not tasks:
        raise ConfigError(f"{arguments.tasks} has no task of split {arguments.split!r}: leave --split out for all")
    name = arguments.name or time.strftime("q%Y%m%d-%H%M%S")
    rollouts = queue(
        tasks,
        name=name,
        members=arguments.members,
        mode=arguments.mode,
        seed=config.seed,
        retries=config.runner.retries.by_cause(),
    )
    store = await _open(arguments)
    try:
        new = 0
        for first in range(0, len(rollouts), 1000):
            new += await store.enqueue(rollouts[first : first + 1000])
        if new < len(rollouts) and (await store.get(rollouts[0].id)).task != rollouts[0].task:
            raise ConfigError(f"--name {name} was used for other tasks: choose another name")
        if not arguments.json:
            there = f"; {len(rollouts) - new} were there already" if new < len(rollouts) else ""
            console().print(f"queued {new} rollouts of {len(tasks)} tasks as {name}-*{there}")
        counts = await _ended(store, {rollout.id for rollout in rollouts}, arguments) if arguments.wait else {}
    finally:
        await store.close()
    if arguments.json:
        json_line({"name": name, "tasks": len(tasks), "rollouts": len(rollouts), "queued": new, **counts})
    return 1 if counts.get("failed") else 0


async def _ended(store: Store, ids: set[str], arguments: argparse.Namespace) -> dict[str, int]:
    counts: dict[str, int] = {}
    cursor = 0
    with Live(console=Screen(stderr=True), transient=True, refresh_per_second=4) as live:
        while ids:
            cursor, changed = await store.wait(cursor, timeout=5.0)
            for rollout in changed:
                if rollout.id in ids and rollout.status in TERMINAL:
                    ids.discard(rollout.id)
                    counts[rollout.status] = counts.get(rollout.status, 0) + 1
            live.update(Text(f"{len(ids)} to go  " + _figures(counts)))
    if not arguments.json:
        console().print(_figures(counts), highlight=False)
    return counts


def _figures(counts: Mapping[str, int]) -> str:
    """Leased and succeeded first, then what went wrong."""
    first = [name for name in ("leased", "succeeded") if name in counts]
    names = [*first, *sorted(counts.keys() - set(first))]
    return " · ".join(f"{name} {counts[name]}" for name in names)


# -- runner ------------------------------------------------------------------------------------------------------------


def _runner(arguments: argparse.Namespace) -> int:
    config = configs.load(
        toml=arguments.config,
        sets=arguments.set,
        agent=arguments.agent,
        reward=arguments.reward,
        runner={"workers": arguments.workers} if arguments.workers is not None else None,
    )
    hide_keys(config)  # before agents inherit the environment
    if not config.agent and not config.agents:
        raise ConfigError("which agent? --agent FILE.py:function, a command, or the URL of a service")
    return uvloop.run(_run_agents(config, arguments))


async def _run_agents(config: Config, arguments: argparse.Namespace) -> int:
    store = await _open(arguments, PATIENCE)
    specs = {**({None: config.agent} if config.agent else {}), **config.agents}
    try:
        policies = await store.policies()
        pool = Pool(
            store,
            specs,
            config.runner,
            gateway_url=arguments.url.rstrip("/"),
            model=arguments.model or (policies[0].model if policies else ""),
            name=arguments.name,
            reward=config.reward,
            log=arguments.log,
        )
        await pool.start()
        try:
            drained = await _work(pool, store, config, arguments)
        finally:
            await pool.close()
    finally:
        await store.close()
    if arguments.json:
        json_line(pool.counts)
    else:
        console().print(_figures(pool.counts) or "nothing was queued")
        if pool.counts.keys() - {"leased", "succeeded", "interrupted", "abandoned"}:
            console().print(f"why they failed: {me()} rollouts {arguments.url} --status failed", soft_wrap=True)
    return 130 if drained else 0


async def _work(pool: Pool, store: Store, config: Config, arguments: argparse.Namespace) -> bool:
    """Until told to stop, or until nothing is left to do. Whether it was told to stop."""
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: (now if stop.is_set() else stop).set())
    pool.work()
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(pool.watch())]
    if arguments.until_empty:
        ends.append(asyncio.create_task(_empty(store)))
    progress = asyncio.create_task(_progress(pool, stop, config, arguments))
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        drain = asyncio.create_task(pool.drain(config.runner.drain if stop.is_set() else 0.0))
        impatient = asyncio.create_task(now.wait())
        await asyncio.wait({drain, impatient}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():  # told twice
            await pool.drain(0.0)
        await drain
        impatient.cancel()
        return stop.is_set()
    finally:
        for task in (*ends, progress):
            task.cancel()
        await asyncio.gather(*ends, progress, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _empty(store: Store) -> None:
    """Returns when nothing is queued or running, here or elsewhere."""
    while await store.list(status="queued", limit=1) or await store.list(status="running", limit=1):  # noqa: ASYNC110
        await asyncio.sleep(0.2)


async def _progress(pool: Pool, stop: asyncio.Event, config: Config, arguments: argparse.Namespace) -> None:
    """What the runner does: one live line on a terminal, a line every ten seconds elsewhere, nothing for machines."""
    if arguments.json:
        return
    out, began = Screen(stderr=True, highlight=False), time.monotonic()
    out.print(f"runner {pool.name} at {arguments.url}: up to {config.runner.workers} agents; Ctrl-C drains it")

    def line() -> str:
        ended = sum(count for name, count in pool.counts.items() if name != "leased")
        rate = ended / max(time.monotonic() - began, 1e-9)
        state = "stopping; Ctrl-C again ends it now" if stop.is_set() else f"{rate:.1f}/s"
        return f"running {pool.counts['leased'] - ended} · ended {ended} · {state}  {_figures(pool.counts)}"

    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(10)
            out.print(line())
    with Live(Text(line()), console=out, transient=True, refresh_per_second=4) as live:
        while True:
            await asyncio.sleep(0.25)
            live.update(Text(line()))
