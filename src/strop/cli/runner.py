"""`strop runner`: run an agent on what a store has queued, that of `strop serve` or of a training run."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from functools import partial
from typing import Any

import uvloop
from rich.live import Live
from rich.text import Text

from strop import config as configs
from strop.cli.commands import Commands
from strop.cli.output import format_counts, get_program, make_console, print_json
from strop.cli.served_store import START_SECONDS, add_options, open_served
from strop.config import Config
from strop.errors import ConfigError, PlaceError, RunEnded, StoreError
from strop.monitor.screen import Screen
from strop.net import addresses
from strop.net.secrets import hide_keys
from strop.runners.gateway_check import GatewayCheck
from strop.runners.pool import Pool
from strop.store.base import Store
from strop.version import __version__


def add(commands: Commands) -> None:
    runner = commands.add_parser("runner", help="run an agent on what a store has queued")
    add_options(runner)
    runner.add_argument("--agent", help="FILE.py:function, package.module:function, a command, or a service's URL")
    runner.add_argument("--reward", metavar="FILE.py:function", help="turns (task, answer) into rewards")
    runner.add_argument("--workers", type=int, help="agents at work at once (default: 16)")
    runner.add_argument("--model", help="what agents are told to ask for (default: the store's policy)")
    runner.add_argument("--gateway", metavar="URL", help="where agents ask for the model (default: --url)")
    runner.add_argument("--name", help="what this runner is called (default: host and process)")
    runner.add_argument("--config", metavar="TOML", help="settings from a file: agent, agents, reward, runner")
    runner.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    runner.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="seconds to wait for a run that is away (default: 600)"
    )
    runner.add_argument("--until-empty", action="store_true", help="end when nothing is queued or running any more")
    runner.add_argument("--log", metavar="FILE", help="what agents' processes print outside rollouts")
    runner.add_argument("--json", action="store_true", help="print the counts as JSON at the end and nothing else")
    runner.set_defaults(command=_runner)


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
    if not config.runner.workers:
        raise ConfigError("runner.workers is 0, so no agent would run. Fix: give --workers 1 or more")
    return uvloop.run(_run_agents(config, arguments))


async def _run_agents(config: Config, arguments: argparse.Namespace) -> int:
    say_outage = partial(_say_outage, arguments)
    store = await open_served(
        arguments, min(START_SECONDS, arguments.wait), outage=arguments.wait, on_outage=say_outage
    )
    check = GatewayCheck(arguments.gateway) if arguments.gateway else None
    specs = {**({None: config.agent} if config.agent else {}), **config.agents}
    try:
        model = await _find_model(arguments.url, store)
        pool = Pool(
            store,
            specs,
            config.runner,
            gateway_url=(arguments.gateway or arguments.url).rstrip("/"),
            gateway_check=check,
            model=arguments.model or model,
            name=arguments.name,
            reward=config.reward,
            log=arguments.log,
        )
        if check is not None and not await check.answers():
            raise PlaceError(
                f"the gateway at {arguments.gateway} does not answer, and agents would ask it. Fix: have its port open "
                "between its machine and this one"
            )
        drained, ended = False, ""
        await pool.start()
        try:
            drained = await _work(pool, store, config, arguments)
        except RunEnded as error:
            ended = str(error)
        finally:
            await pool.close()
    finally:
        if check is not None:
            await check.close()
        await store.close()
    if ended and not arguments.json:
        make_console().print(f"{ended}: {arguments.url}", soft_wrap=True)
    if arguments.json:
        print_json(pool.counts)
    else:
        make_console().print(format_counts(pool.counts) or "nothing was queued")
        if pool.counts.keys() - {"leased", "succeeded", "interrupted", "abandoned"}:
            make_console().print(
                f"why they failed: {get_program()} rollouts {arguments.url} --status failed", soft_wrap=True
            )
    return 130 if drained else 0


async def _find_model(url: str, store: Store) -> str:
    """What agents are told to ask for. Raises `StoreError` where another version of strop answers."""
    address = await asyncio.to_thread(addresses.read, url.rstrip("/"))
    if address.strop != __version__:
        theirs = f"strop {address.strop}" if address.strop else "an older strop"
        raise StoreError(f"{url} is {theirs}, and this is {__version__}. Fix: install the same version on both sides")
    policies = [policy for policy in await store.policies() if policy.kind != "prompt"]
    return address.model or (policies[0].model if policies else "")


def _say_outage(arguments: argparse.Namespace, why: Exception | None) -> None:
    if arguments.json:
        return
    said = f"{arguments.url} is back"
    if why is not None:
        reason = str(why).partition(". Fix:")[0] if isinstance(why, StoreError) else "it cannot be reached"
        said = f"waiting for {arguments.url}, for up to {arguments.wait:g} s: {reason}"
    print(said, file=sys.stderr)


async def _work(pool: Pool, store: Store, config: Config, arguments: argparse.Namespace) -> bool:
    """Until told to stop, or until nothing is left to do. Whether it was told to stop."""
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: (now if stop.is_set() else stop).set())
    pool.work()
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait()), asyncio.create_task(pool.watch())]
    if arguments.until_empty:
        ends.append(asyncio.create_task(_wait_until_empty(store)))
    progress = asyncio.create_task(_show_progress(pool, stop, config, arguments))
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


async def _wait_until_empty(store: Store) -> None:
    """Returns when nothing is queued or running, here or elsewhere."""
    while any((await store.count_open()).values()):  # noqa: ASYNC110
        await asyncio.sleep(0.2)


async def _show_progress(pool: Pool, stop: asyncio.Event, config: Config, arguments: argparse.Namespace) -> None:
    """What the runner does: one live line on a terminal, a line every ten seconds elsewhere, nothing for machines."""
    if arguments.json:
        return
    out, began = Screen(stderr=True, highlight=False), time.monotonic()
    out.print(f"runner {pool.name} at {arguments.url}: up to {config.runner.workers} agents; Ctrl-C drains it")

    def line() -> str:
        ended = sum(count for name, count in pool.counts.items() if name != "leased")
        rate = ended / max(time.monotonic() - began, 1e-9)
        state = "stopping; Ctrl-C again ends it now" if stop.is_set() else f"{rate:.1f}/s"
        return f"running {pool.counts['leased'] - ended} · ended {ended} · {state}  {format_counts(pool.counts)}"

    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(10)
            out.print(line())
    with Live(Text(line()), console=out, transient=True, refresh_per_second=4) as live:
        while True:
            await asyncio.sleep(0.25)
            live.update(Text(line()))
