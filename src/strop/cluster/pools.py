"""Runner pools on nodes: as many as queued rollouts need, between two bounds. One that dies is started again, maybe on
another node; what it was running is run again once its leases have expired.

    watch ── every BEAT: how many? ──▶ a task per pool: place ▶ start ▶ ask how it is ... it ended ▶ place ▶ ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from strop.cluster.calls import ask, end_actor, find_cause
from strop.cluster.connection import import_part
from strop.cluster.gateways import NodeGateways
from strop.cluster.hosts import HostPlace, RunnerHost
from strop.cluster.journal import Journal
from strop.cluster.plan import ClusterNode
from strop.config import Config, RunnerConfig, walk
from strop.errors import PlaceError
from strop.net.server import name_from_elsewhere
from strop.run.state import Run
from strop.store.base import Store

BEAT = 1.0
"""Seconds between two questions how a pool is."""
DEADLINE = 60.0
"""Seconds that a host may take to answer; then it counts as lost."""
IDLE = 30.0
"""Seconds for which fewer pools must have been enough before one is ended."""
SHORT, TRIES = 90.0, 3
"""A pool that ended by itself within so many seconds, so many times in a row, cannot work. It gives up after 60 where
it does not reach the run."""


class RunnerPools:
    """Of one run, whose nodes reach this command at `address`. `nodes` are where the first pools go."""

    def __init__(self, ray: Any, config: Config, address: str, nodes: Sequence[ClusterNode], journal: Journal) -> None:
        self._ray, self._config, self._address, self._nodes, self._journal = ray, config, address, nodes, journal
        self._have_started, self._began = False, 0.0
        self._gateways: NodeGateways | None = None

    async def watch(self, run: Run, gateways: NodeGateways | None = None) -> None:
        """Keep them at work until cancelled. Agents ask one of `gateways`, where there are some."""
        self._gateways, self._began = gateways, time.monotonic()
        pools: dict[int, KeptPool] = {}
        enough = time.monotonic()
        try:
            while True:
                wanted = await count_pools(self._config, run.store)
                at_work = [number for number, pool in pools.items() if not pool.leaves.is_set()]
                for _ in range(wanted - len(at_work)):
                    number = next(number for number in itertools.count() if number not in pools)
                    pools[number] = KeptPool(self._keep_pool, number, run)
                if len(at_work) <= wanted:
                    enough = time.monotonic()
                elif time.monotonic() - enough > IDLE:
                    pools[max(at_work)].leaves.set()  # its agents may take a while to end
                for number, pool in list(pools.items()):
                    if pool.task.done():
                        pool.task.result()
                        del pools[number]
                await asyncio.sleep(BEAT)
        finally:
            for pool in pools.values():
                pool.task.cancel()
            await asyncio.gather(*(pool.task for pool in pools.values()), return_exceptions=True)

    async def _keep_pool(self, number: int, run: Run, leaves: asyncio.Event) -> None:
        """One pool, again and again, until it is not needed any more."""
        name, log = f"runner pool {number}", run.folder.path.absolute() / f"runner-{number}.log"
        failed, times = 0, 0
        node = self._nodes[number].id if number < len(self._nodes) else ""
        while not leaves.is_set():
            host, code, where, began = self._place(node), None, "", time.monotonic()
            end, why, by_itself, drain = "died", "", False, 0.0
            try:
                there, pid, gateway = await self._start(host, number, run, log)
                where, node = there.name, there.node
                self._journal.write_start(name, there, host, pid, again=times > 0, url=gateway)
                began = time.monotonic()
                while (code := await ask(host.poll.remote(), DEADLINE)) is None and not leaves.is_set():
                    if self._gateways is not None and gateway and not self._gateways.answers(gateway):
                        break
                    await asyncio.sleep(BEAT)
                if code is not None:
                    why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                    if by_itself := code > 0:
                        why += f": {read_last_line(log).removeprefix('strop: ').partition('. Fix:')[0]}"
                elif leaves.is_set():
                    end, why, drain = "ended", "fewer are enough now", self._config.runner.drain
                else:
                    end, why = "ended", f"its gateway at {gateway} is gone"
            except self._ray.exceptions.RayTaskError as error:  # of its host, such as a log that cannot be written
                why, by_itself = f"could not be started: {find_cause(error)}", True
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                why = "its host is gone" if where else f"it could not be placed: {type(error).__name__}"
                node = node if where else ""
            finally:
                await self._stop(host, drain)
            self._journal.write_end(end, name, node=where, why=why)
            failed = failed + 1 if by_itself and time.monotonic() - began < SHORT else 0
            if failed == TRIES:
                said = f"ends as soon as it is started: {read_last_line(log)}" if where else why
                raise PlaceError(f"{name} {f'on {where} ' if where else ''}{said}. Its log is {log}")
            if not by_itself:
                self._refuse_hopeless(name, where)
            times += 1
            if not leaves.is_set():
                await asyncio.sleep(min(2.0**failed, 30.0))

    def _place(self, node: str) -> Any:
        """On this node if it is there, otherwise wherever there is room."""
        strategies = import_part("util.scheduling_strategies")
        where = strategies.NodeAffinitySchedulingStrategy(node, soft=True) if node else "SPREAD"
        cpus = self._config.cluster.runner_cpus
        return self._ray.remote(RunnerHost).options(num_cpus=cpus, max_restarts=0, scheduling_strategy=where).remote()

    async def _start(self, host: Any, number: int, run: Run, log: Path) -> tuple[HostPlace, int, str]:
        """Returns where it is, its process there, and the gateway that its agents ask, if it is not the run's own."""
        assert run.shared is not None, "runners join over the network"
        place: HostPlace = await ask(host.describe.remote(), self._config.cluster.timeout)
        url = name_from_elsewhere(run.shared.url, self._config.gateway.host, self._address)
        words = [*list_words(self._config, url, number), "--log", str(log)]
        gateway = self._gateways.choose(f"runner pool {number}", place.node) if self._gateways is not None else ""
        words += ["--gateway", gateway] if gateway else []
        pid: int = await ask(host.start.remote(words, run.shared.key, str(log), str(Path.cwd())), DEADLINE)
        self._have_started = True
        return place, pid, gateway

    def _refuse_hopeless(self, name: str, where: str) -> None:
        """None at all could be placed for as long as was to be waited. Before that, a node was lost on which it was."""
        waited = time.monotonic() - self._began
        if not where and not self._have_started and waited >= self._config.cluster.timeout:
            raise PlaceError(
                f"the cluster has no room now for {name} of {self._config.cluster.runner_cpus} CPUs, which others use. "
                "Fix: see `ray status`, wait for them, or raise cluster.timeout"
            )

    async def _stop(self, host: Any, drain: float) -> None:
        """Its agents have so many seconds to end. Leases of those that do not are given back by the run, or expire."""
        with contextlib.suppress(Exception):  # it may be gone, with its node
            await ask(host.stop.remote(drain), drain + 10.0)
        end_actor(self._ray, host)


class KeptPool:
    """`leaves` is set once it is not needed any more."""

    def __init__(self, keep: Callable[[int, Run, asyncio.Event], Coroutine[Any, Any, None]], number: int, run: Run):
        self.leaves = asyncio.Event()
        self.task = asyncio.create_task(keep(number, run, self.leaves))


async def count_pools(config: Config, store: Store) -> int:
    """How many have agents for all that is queued or running, within bounds."""
    least, most = config.cluster.runners, config.cluster.max_runners
    if most <= least:
        return least
    rollouts = sum((await store.count_open()).values())
    return min(max(-(-rollouts // config.runner.workers), least), most)


def list_words(config: Config, url: str, number: int) -> list[str]:
    """The options of `strop runner` for one pool of a run. Retries are the run's."""
    words = ["--url", url, "--key-file", "-", "--name", f"pool-{number}", "--workers", str(config.runner.workers)]
    words += ["--agent", config.agent] if config.agent else []
    words += ["--reward", config.reward] if config.reward else []
    plain = {setting.key: setting.value for setting in walk(RunnerConfig(), "runner.")}
    for setting in walk(config.runner, "runner."):
        own = setting.key in ("runner.workers", "runner.remote") or setting.key.startswith("runner.retries.")
        if not own and setting.value != plain[setting.key]:
            words += ["--set", f"{setting.key}={msgspec.json.encode(setting.value).decode()}"]
    for name, spec in config.agents.items():
        words += ["--set", f"agents.{name}={msgspec.json.encode(spec).decode()}"]
    return words


def read_last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip().removesuffix(".") for line in reversed(lines) if line.strip()), "it said nothing")
