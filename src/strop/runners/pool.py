"""Keeps agents at work: lease rollouts, run an agent on each, keep the leases alive, report what came of it.

    store.lease ──▶ _lease ──▶ one task per attempt: Agent.run ──▶ store.finish
    store.heartbeat ◀── _beat, for all of them at once: what is over is stopped

As many are leased as can run, `workers` in all: what cannot be run now stays in the queue for others. An
agent that takes too long is stopped (`timeout`), and so is one whose rollout was cancelled or reclaimed meanwhile.
The pool does not know what kind of agents they are (`agents` makes them).

Left out: ending attempts of runners that are lost, which is for the owner of the store (`store/reclaim`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from strop.agent.llm import LLM
from strop.config import RunnerConfig
from strop.errors import BadReward, Fenced, StoreError, Unavailable
from strop.runners import agents
from strop.runners.base import Agent, Job, Outcome, Say
from strop.runners.gateway_check import GatewayCheck
from strop.store.base import Ref, Store
from strop.types import Event, EventKind, Lease, Rollout, Sampling, Task

ENGINE_DOWN = "engine_down"
LET_DOWN = frozenset(
    {
        ENGINE_DOWN,
        "engine_error",
        "store_error",
        "stale_session",
        "server_error",
        "deadline_exceeded",
        "outside_unreachable",
        "outside_refused",
        "budget_used_up",
    }
)
"""What the gateway, or the run, writes into an error event when it was not the agent's doing. One that ran out of time
is let off only where there was nobody to answer it."""
GATEWAY_GONE = Outcome(cause="interrupted", detail="the gateway does not answer", clean=False)
STOPPED = Outcome(cause="interrupted", detail="the runner was told to stop", clean=False)


class Pool:
    """Runs agents on whatever the store has queued, `config.workers` at a time.

        pool = Pool(store, {None: "agent.py:agent"}, config.runner, gateway_url="http://127.0.0.1:8000", model="main")
        await pool.start()  # raises AgentError if an agent cannot be had
        pool.work()  # from here on rollouts are leased
        ...
        await pool.drain(30)  # let them end, give the rest back
        await pool.close()

    `specs` says which agent runs a task that names it with `agent`; None is for all others. `reward` is the reward
    function. What agents say outside of any rollout goes to the file `log`. `sampling` says what a rollout's
    `llm.sampling` shows. `wait_for_calls` waits until the gateway has recorded the calls of an agent that was
    killed. `gateway_check` is for a gateway that may be gone while the store is there: an agent that failed then is run
    again, once it answers. Agents in containers see nothing of the folders `private`.
    `counts` says what happened so far: leased, succeeded, abandoned (not wanted any more), or the cause of a failure.
    """

    def __init__(
        self,
        store: Store,
        specs: Mapping[str | None, str],
        config: RunnerConfig,
        *,
        gateway_url: str,
        model: str,
        name: str | None = None,
        reward: str = "",
        log: str | Path | None = None,
        sampling: Callable[[Rollout], Sampling] | None = None,
        wait_for_calls: Callable[[str, int], Awaitable[None]] | None = None,
        gateway_check: GatewayCheck | None = None,
        private: Sequence[Path] = (),
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.counts: Counter[str] = Counter()
        self._store = store
        self._specs = specs
        self._config = config
        self._gateway_url = gateway_url
        self._model = model
        self._reward = reward
        self._log = None if log is None else Path(log)
        self._sampling = sampling
        self._wait_for_calls = wait_for_calls
        self._gateway_check = gateway_check
        self._private = private
        self._agents: dict[str | None, Agent] = {}
        self._folder: str | None = None
        self._task_files: list[str] = []  # of jobs that are over, to be written over
        self._num_task_files = 0
        self._running: dict[Ref, _Running] = {}
        self._has_capacity = asyncio.Event()
        self._stands_still = False
        self._went_on = 0.0
        self._token: str | None = None  # of the request for leases that is under way
        self._leasing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Get every agent ready. They are idle until `work` is called."""
        self._folder = tempfile.mkdtemp(prefix="strop-runners-")
        host = urlsplit(self._gateway_url).hostname or ""
        try:
            for name, spec in self._specs.items():
                self._agents[name] = agents.make(
                    spec,
                    self._config,
                    folder=self._folder,
                    reward=self._reward,
                    log=self._log,
                    host=host,
                    private=self._private,
                )
            for agent in self._agents.values():
                await agent.start()
        except BaseException:
            await self.close()
            raise

    def work(self) -> None:
        """Lease and run what the store has queued, until drained or closed."""
        if not self._config.workers:
            return
        self._has_capacity.set()
        self._leasing = self._begin(self._lease())
        self._begin(self._beat())

    async def watch(self) -> None:
        """Wait until the pool is closed. Raises what it cannot survive: the store fails, agents cannot be started."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def slowest(self, count: int = 3) -> list[tuple[str, float]]:
        """The rollouts that have been at work for the longest, and for how many seconds."""
        now = time.monotonic()
        first = itertools.islice(self._running.items(), count)  # they stand in the order in which they began
        return [(ref[0], now - running.since) for ref, running in first]

    def stop_clock(self) -> None:
        """Agents that are started from here on get their whole time from `go_on` on: until then the model does not
        answer."""
        self._stands_still = True

    def go_on(self) -> None:
        """The model answers again. Where the clock was not stopped nobody gets more time."""
        if self._stands_still:
            self._stands_still, self._went_on = False, time.monotonic()

    async def drain(self, seconds: float) -> None:
        """Lease nothing more, let running agents end for up to `seconds`, then end the rest and give them back to the
        queue, so that nobody has to wait for their leases to run out. Said again meanwhile, the shorter time counts."""
        await self._stop_leasing()
        if self._running:
            await asyncio.wait([running.task for running in self._running.values()], timeout=seconds)
        for running in self._running.values():
            running.stop(STOPPED)
        if self._running:
            await asyncio.wait([running.task for running in self._running.values()])

    async def close(self) -> None:
        """End everything at once. Attempts that were running stay open: `store.reclaim(everything=True)` queues them
        again when the run is resumed; before that, their leases run out."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closed = await asyncio.gather(*(agent.close() for agent in self._agents.values()), return_exceptions=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ended.set()
        for error in closed:
            if error is not None:
                raise error

    # -- leases ----------------------------------------------------------------------------------------------------

    async def _lease(self) -> None:
        while True:
            await self._has_capacity.wait()
            if self._gateway_check is not None:
                await self._gateway_check.wait_until_back()
            self._token = secrets.token_hex(8)
            leases = await self._store.lease(
                self.name,
                seconds=self._config.lease,
                count=self._config.workers - len(self._running),
                wait=self._config.lease,
                token=self._token,
            )
            self._token = None
            for lease in leases:
                self._take(lease)
            if len(self._running) >= self._config.workers:
                self._has_capacity.clear()

    async def _stop_leasing(self) -> None:
        if self._leasing is None:
            return
        self._leasing.cancel()
        await asyncio.wait([self._leasing])
        self._leasing = None
        if self._token is not None:  # leases may have been on their way: the same token gives them again
            with contextlib.suppress(StoreError):
                for lease in await self._store.lease(self.name, seconds=self._config.lease, token=self._token):
                    self.counts["leased"] += 1
                    await self._finish(_ref(lease), STOPPED)

    async def _beat(self) -> None:
        """Keep all leases alive, and stop what is over for the store."""
        while True:
            await asyncio.sleep(self._config.lease / 3)
            for ref in await self._store.heartbeat(list(self._running), seconds=self._config.lease):
                if running := self._running.get(ref):
                    running.stop(None)

    # -- attempts --------------------------------------------------------------------------------------------------

    def _take(self, lease: Lease) -> None:
        self.counts["leased"] += 1
        stopped: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._running[_ref(lease)] = _Running(self._begin(self._attempt(lease, stopped)), stopped, time.monotonic())

    async def _attempt(self, lease: Lease, stopped: asyncio.Future[Outcome | None]) -> None:
        ref = _ref(lease)
        try:
            await self._conclude(ref, await self._run(lease, stopped))
        except Unavailable:
            raise
        except (StoreError, BadReward) as error:  # the store takes no such words: that is about one agent, not the pool
            cause = "bad_reward" if isinstance(error, BadReward) else "agent_error"
            await self._conclude(ref, Outcome(cause=cause, detail=str(error), clean=False))
        finally:
            del self._running[ref]
            self._has_capacity.set()

    async def _conclude(self, ref: Ref, outcome: Outcome | None) -> None:
        if outcome is None:
            self.counts["abandoned"] += 1
            return
        if not outcome.clean and self._wait_for_calls is not None:
            # Its calls in flight end with it: they are recorded before the attempt is closed to them.
            await self._wait_for_calls(*ref)
        if outcome.cause in ("agent_error", "timeout"):
            # In this order: what a gateway had in flight is said in events before its successor answers.
            if self._gateway_check is not None and not await self._gateway_check.answers():
                outcome = GATEWAY_GONE
            elif await self._find_codes(ref) & (LET_DOWN if outcome.cause == "agent_error" else {ENGINE_DOWN}):
                outcome = msgspec.structs.replace(outcome, cause="engine_error")
        await self._finish(ref, outcome)

    async def _run(self, lease: Lease, stopped: asyncio.Future[Outcome | None]) -> Outcome | None:
        """What came of an attempt, or None if it was ended by someone else."""
        task = lease.rollout.task
        agent = self._agents.get(task.agent)
        if agent is None:
            return Outcome(cause="agent_error", detail=_no_agent(task, self._specs))
        job = self._job(lease)
        doing = asyncio.create_task(agent.run(job, self._say(_ref(lease))))
        try:
            began = time.monotonic()
            while not (doing.done() or stopped.done()) and (left := self._find_time_left(began)) > 0:
                await asyncio.wait({doing, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            if stopped.done():
                return stopped.result()
            limit = f"{self._config.timeout:g} s (runner.timeout)"
            return Outcome(cause="timeout", detail=f"the agent was stopped after {limit}", clean=False)
        finally:
            doing.cancel()  # it lets go once everything it started is ended
            await asyncio.gather(doing, return_exceptions=True)
            self._task_files.append(job.task_file)

    def _find_time_left(self, began: float) -> float:
        now = time.monotonic()
        return self._config.timeout - (0.0 if self._stands_still else now - max(began, self._went_on))

    def _job(self, lease: Lease) -> Job:
        sampling = self._sampling(lease.rollout) if self._sampling else None
        llm = LLM.at(self._gateway_url, lease, model=self._model, sampling=sampling)
        return Job(llm=llm, seed=lease.rollout.seed, task_file=self._take_task_file())

    def _take_task_file(self) -> str:
        if self._task_files:
            return self._task_files.pop()
        self._num_task_files += 1
        return f"{self._folder}/{self._num_task_files}.json"

    def _say(self, ref: Ref) -> Say:
        async def say(kind: EventKind, data: dict[str, Any]) -> None:
            event = Event(rollout=ref[0], attempt=ref[1], kind=kind, data=data, time=time.time())
            with contextlib.suppress(Fenced):  # nobody wants to hear it any more
                await self._store.add_events([event])

        return say

    async def _find_codes(self, ref: Ref) -> set[Any]:
        """Of what let an agent down: the gateway says so in events, and the run does."""
        events = await self._store.events(ref[0], attempt=ref[1])
        return {event.data.get("code") for event in events if event.kind == "error"}

    async def _finish(self, ref: Ref, outcome: Outcome) -> None:
        try:
            await self._store.finish(*ref, rewards=outcome.rewards, cause=outcome.cause, detail=outcome.detail)
        except Fenced:  # cancelled or reclaimed in the meantime: nobody wants it any more
            self.counts["abandoned"] += 1
        else:
            self.counts[outcome.cause or "succeeded"] += 1

    # -- tasks -----------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._ended.set()


@dataclass
class _Running:
    """An attempt at work. `stopped` is set to end it: to what it then came to."""

    task: asyncio.Task[None]
    stopped: asyncio.Future[Outcome | None]
    since: float

    def stop(self, outcome: Outcome | None) -> None:
        if not self.stopped.done():
            self.stopped.set_result(outcome)


def _ref(lease: Lease) -> Ref:
    return lease.attempt.rollout, lease.attempt.number


def _no_agent(task: Task, specs: Mapping[str | None, str]) -> str:
    if task.agent is None:
        return f"task {task.id!r} picks no agent, and there is no main one: set `agent`"
    known = ", ".join(sorted(name for name in specs if name)) or "none so far"
    return f"task {task.id!r} picks the agent {task.agent!r}, which is not there: add it to `agents` ({known})"
