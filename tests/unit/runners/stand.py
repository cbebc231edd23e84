"""A pool at work on a real store, and ways to look at what it does."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from strop.config import RunnerConfig
from strop.runners.pool import Pool
from strop.store.base import Store
from strop.types import TRANSITIONS, Cause, Retry, Rollout, Task

AGENTS = Path(__file__).parent / "pool_agents.py"
AGENT = f"{AGENTS}:agent"
ASYNC = f"{AGENTS}:agent_async"
ONCE: dict[Cause, Retry] = {"lost_runner": Retry(limit=1)}


def make_pool(store: Store, spec: str | dict[str | None, str] = AGENT, **given: Any) -> Pool:
    """`given` are settings of the runner, or what a pool takes besides."""
    names = ("reward", "log", "name", "wait_for_calls", "gateway_check", "sampling")
    own = {name: given.pop(name) for name in names if name in given}
    settings = RunnerConfig(**({"workers": 2, "timeout": 20.0} | given))
    specs = {None: spec} if isinstance(spec, str) else spec
    return Pool(store, specs, settings, gateway_url="http://127.0.0.1:9/", model="main", **own)


@contextlib.asynccontextmanager
async def running(store: Store, spec: str | dict[str | None, str] = AGENT, **given: Any) -> AsyncIterator[Pool]:
    before = children()
    pool = make_pool(store, spec, **given)
    await pool.start()
    pool.work()
    try:
        yield pool
    finally:
        await pool.close()
    assert children() <= before, "processes are left"


async def enqueue(store: Store, *tasks: dict[str, Any] | Task, retries: dict[Cause, Retry] = ONCE) -> list[str]:
    """Queue a rollout of each task, and return their ids."""
    stats = await store.stats()
    before = sum(stats[status] for status in TRANSITIONS)
    rollouts = [
        Rollout(
            id=f"g{n:03d}.0",
            group=f"g{n:03d}",
            member=0,
            task=given if isinstance(given, Task) else Task(id=f"g{n:03d}", data=given),
            created=0.0,
            retries=retries,
        )
        for n, given in enumerate(tasks, before)
    ]
    await store.enqueue(rollouts)
    return [rollout.id for rollout in rollouts]


async def ended(store: Store, ids: list[str], limit: float = 60) -> list[Rollout]:
    """Wait until all of them ended."""
    async with asyncio.timeout(limit):
        cursor, waiting = 0, set(ids)
        while waiting:
            cursor, changed = await store.wait(cursor, timeout=5)
            waiting -= {rollout.id for rollout in changed if rollout.ended}
        return [await store.get(id) for id in ids]


async def run(store: Store, *tasks: dict[str, Any] | Task, retries: dict[Cause, Retry] = ONCE) -> list[Rollout]:
    return await ended(store, await enqueue(store, *tasks, retries=retries))


async def printed(store: Store, rollout: str) -> str:
    """What the last attempt of a rollout printed."""
    return "".join(event.data["text"] for event in await store.events(rollout) if event.kind == "message")


async def at_work(store: Store, count: int) -> None:
    """Wait until so many are running."""
    async with asyncio.timeout(30):
        while (await store.stats())["running"] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def lease_renewed(store: Store, rollout: str) -> None:
    """Wait until the lease of a running rollout was made longer."""
    *_, first = await store.attempts(rollout)
    async with asyncio.timeout(30):
        while (await store.attempts(rollout))[-1].lease_until <= first.lease_until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def written(file: Path) -> str:
    """Wait until a file has something in it."""
    assert await eventually(lambda: file.exists() and file.read_text(), 30), f"{file} is not written"
    return file.read_text()  # noqa: ASYNC240


def children() -> set[str]:
    """Processes whose parent is this one, as lines of `ps`."""
    found = subprocess.run(
        ["ps", "--no-headers", "-o", "pid,args", "--ppid", str(os.getpid())], capture_output=True, check=False
    )
    return {line for line in found.stdout.decode().splitlines() if "ps --no-headers" not in line}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
