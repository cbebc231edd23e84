"""Keeps agents at work: lease a rollout, hand it to a worker process, keep the lease alive, report what came of it.

    store.lease ──▶ slot ──Job──▶ worker process ──▶ agent ──▶ gateway
    store.finish ◀── slot ◀──Outcome──┘

One slot per worker, `workers` of them. An agent that takes too long is killed with its worker (`timeout`), a worker
that dies is noticed (`lost_runner`), a rollout that was cancelled meanwhile is stopped at the next heartbeat; each time
a fresh worker takes the place.

Left out for now: agents as commands and as HTTP services; several agents picked by `task.agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from strop.config import RunnerConfig
from strop.errors import AgentError, Fenced, PlaceError
from strop.runners import wire
from strop.runners.llm import LLM
from strop.runners.zygote import Zygote
from strop.store.base import Store
from strop.types import Lease, Rollout, Sampling

GONE = (asyncio.IncompleteReadError, ConnectionError)
START_LIMIT = 120.0
"""Seconds an agent's imports may take."""


class Pool:
    """Runs `agent_spec` on whatever the store has queued, `config.workers` at a time.

        pool = Pool(store, "agent.py:agent", config.runner, gateway_url="http://127.0.0.1:8000", model="main")
        await pool.start()  # raises AgentError if the agent cannot be imported
        pool.work()  # from here on rollouts are leased
        ...
        await pool.close()

    What agents print goes to the file `log` (default: nowhere). `sampling` says what a rollout's `llm.sampling` shows.
    `settled` waits until the gateway has recorded the calls that an attempt's dead worker left behind.
    """

    def __init__(
        self,
        store: Store,
        agent_spec: str,
        config: RunnerConfig,
        *,
        gateway_url: str,
        model: str,
        log: str | Path | None = None,
        sampling: Callable[[Rollout], Sampling] | None = None,
        settled: Callable[[str, int], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._agent = agent_spec
        self._config = config
        self._gateway_url = gateway_url.rstrip("/")
        self._model = model
        self._log = log
        self._sampling = sampling
        self._settled = settled
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._zygote: Zygote | None = None
        self._folder: str | None = None

    async def start(self) -> None:
        """Start the workers, the first one alone: if it cannot load the agent, none could, and nothing has begun. They
        are idle until `work` is called."""
        try:
            self._zygote = self._make_zygote()
            first = await self._start_worker()
            others = await asyncio.gather(*(self._start_worker() for _ in range(self._config.workers - 1)))
        except BaseException:
            await self.close()
            raise
        self._idle = [first, *others]

    def work(self) -> None:
        """Lease and run what the store has queued, until closed."""
        for number, worker in enumerate(self._idle):
            self._tasks.append(asyncio.create_task(self._slot(number, worker)))
        self._tasks.append(asyncio.create_task(self._reclaim()))

    async def watch(self) -> None:
        """Wait until the pool cannot go on (the store fails, workers cannot start), and raise that."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()

    async def close(self) -> None:
        """End all workers at once. Attempts they were running stay open: `store.reclaim(everything=True)` queues them
        again when the run is resumed; before that, their lease runs out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for worker in list(self._workers):
            self._discard(worker)
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # -- work ----------------------------------------------------------------------------------------------------

    async def _slot(self, number: int, worker: Worker) -> None:
        runner = f"local-{number}"
        task_file = f"{self._folder}/{number}.json"
        while True:
            lease = await self._store.lease(runner, seconds=self._config.lease, wait=self._config.lease)
            if lease is None:
                continue
            outcome = await self._run(worker, self._job(lease, task_file), lease)
            if worker not in self._workers and self._settled is not None:
                # Its calls in flight end with it: they are recorded before the attempt is closed to them.
                await self._settled(lease.rollout.id, lease.attempt.number)
            if outcome is not None and outcome.cause == "agent_error" and await self._engine_failed(lease):
                outcome = msgspec.structs.replace(outcome, cause="engine_error")
            if outcome is not None:
                with contextlib.suppress(Fenced):  # cancelled or reclaimed in the meantime: nobody wants it any more
                    await self._store.finish(
                        lease.rollout.id,
                        lease.attempt.number,
                        rewards=outcome.rewards,
                        cause=outcome.cause,
                        detail=outcome.detail,
                    )
            if worker not in self._workers:
                worker = await self._start_worker()

    async def _run(self, worker: Worker, job: wire.Job, lease: Lease) -> wire.Outcome | None:
        """What came of a job, or None if the attempt was ended by someone else. A worker that failed is discarded."""
        answer = asyncio.create_task(worker.run(job))
        beat = asyncio.create_task(self._beat(lease))
        try:
            await asyncio.wait({answer, beat}, timeout=self._config.timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            self._discard(worker)
            if beat.done():
                beat.result()  # the store's failure, if that is what ended it
                return None
            limit = f"{self._config.timeout:g} s (runner.timeout)"
            return wire.Outcome(cause="timeout", detail=f"the agent was stopped after {limit}")
        except GONE:
            self._discard(worker)
            assert self._zygote is not None
            code = await self._zygote.ended(worker.pid)
            return wire.Outcome(cause="lost_runner", detail=f"the agent's process died: {_how(code)}")
        finally:
            for task in (answer, beat):
                task.cancel()
            await asyncio.gather(answer, beat, return_exceptions=True)

    async def _engine_failed(self, lease: Lease) -> bool:
        """Whether an agent that raised had been let down by the engine: the gateway says so in an event."""
        events = await self._store.events(lease.rollout.id, attempt=lease.attempt.number)
        return any(event.kind == "error" and event.data.get("code") == "engine_error" for event in events)

    async def _beat(self, lease: Lease) -> None:
        """Keep the lease alive. Returns when the attempt is over for the store."""
        while True:
            await asyncio.sleep(self._config.lease / 3)
            try:
                await self._store.heartbeat(lease.rollout.id, lease.attempt.number, seconds=self._config.lease)
            except Fenced:
                return

    async def _reclaim(self) -> None:
        """Notice runners that are lost, those of other pools too."""
        while True:
            await asyncio.sleep(self._config.lease / 2)
            await self._store.reclaim()

    def _job(self, lease: Lease, task_file: str) -> wire.Job:
        rollout, attempt = lease.rollout, lease.attempt
        base = f"{self._gateway_url}/r/{rollout.id}/{attempt.number}"
        llm = LLM(
            base_url=f"{base}/agents/main/v1",
            api_key=attempt.key,
            model=self._model,
            trace_id=attempt.key,
            events_url=f"{base}/events",
            rollout=rollout.id,
            task=rollout.task,
            sampling=self._sampling(rollout) if self._sampling else Sampling(),
        )
        return wire.Job(llm=llm, seed=rollout.seed, task_file=task_file)

    # -- workers -------------------------------------------------------------------------------------------------

    def _make_zygote(self) -> Zygote:
        # Python's own hashing must not make one run of an agent differ from the next.
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        host = urlsplit(self._gateway_url).hostname
        for name in ("NO_PROXY", "no_proxy"):  # the gateway is reached directly, whatever proxy agents use for the rest
            environment[name] = ",".join(part for part in (environment.get(name), host) if part)
        log = Path(os.devnull if self._log is None else self._log)
        try:
            log.open("ab").close()
        except OSError as error:
            raise PlaceError(f"cannot write the runners' log {log}: {error.strerror}; choose another place") from None
        self._folder = tempfile.mkdtemp(prefix="strop-runners-")
        return Zygote(log, self._folder, environment)

    async def _start_worker(self) -> Worker:
        assert self._zygote is not None
        try:
            async with asyncio.timeout(START_LIMIT):
                pid, connection = await self._zygote.fork()
        except TimeoutError:
            raise AgentError(
                f"no worker process could be started within {START_LIMIT:g} s: try fewer with runner.workers"
            ) from None
        worker = Worker(pid, *await asyncio.open_connection(sock=connection))
        self._workers.add(worker)
        try:
            async with asyncio.timeout(START_LIMIT):
                error = await worker.load(wire.Start(agent=self._agent, sys_path=sys.path))
        except TimeoutError:
            error = f"agent: importing {self._agent} took more than {START_LIMIT:g} s: do slow work in the agent itself"
        except GONE:
            how = _how(await self._zygote.ended(pid))
            error = f"agent: the process that imports {self._agent} died: {how}; look into the runners' log"
        if error is not None:
            self._discard(worker)
            raise AgentError(error)
        return worker

    def _discard(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()


class Worker:
    """The pool's side of one worker process."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer

    async def load(self, start: wire.Start) -> str | None:
        self._writer.write(wire.pack(start))
        return (await wire.receive(self._reader, wire.Ready)).error

    async def run(self, job: wire.Job) -> wire.Outcome:
        self._writer.write(wire.pack(job))
        return await wire.receive(self._reader, wire.Outcome)

    def kill(self) -> None:
        """End the worker and everything its agent started."""
        if not self._reader.at_eof():  # after its end the number may belong to someone else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._writer.close()


def _how(code: int | None) -> str:
    if code is None:
        return "it is not known how"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
