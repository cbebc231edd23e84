"""Python agents in worker processes, one job at a time each: the way that needs no care from the agent's author.

    run ──Job──▶ worker process ──▶ agent ──▶ gateway
        ◀──JobDone──┘      └──▶ PID.out, what it prints: told as events when the job is over, however it ended

An agent may hold the interpreter's lock, change the environment, crash or never end: it does so in its own process,
which is killed with all that the agent started and replaced when the next job needs one.

Left out: a bound on what an agent prints while it runs. It is cut when it is told, but lies on disk until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from strop.agent.llm import bypass_proxy
from strop.config import RunnerConfig
from strop.errors import AgentError, PlaceError
from strop.files import private
from strop.net.process_group import ProcessTrees, kill_leftovers
from strop.net.secrets import child_environment
from strop.runners import output, worker_messages
from strop.runners.base import Agent, Job, Outcome, Say
from strop.runners.forkserver import ForkedWorker, ForkServer, source_path
from strop.runners.output import KEPT
from strop.version import __version__

GONE = (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError)
"""The worker is gone, or makes no sense any more."""
IN_AGENT = "STROP_IN_AGENT"
"""A variable of processes that run agents: a script that they read to find the agent in it must not begin a run."""

START_LIMIT = 120.0
"""Seconds an agent's imports may take."""


class ProcessAgent(Agent):
    """The function `spec`, in up to `config.workers` processes.

    What is printed while it is imported goes to the file `log`. `reward` is the reward function, which runs in the
    worker too. `folder` is for the workers' files and goes when they go. `host` is the gateway's, reached without a
    proxy.
    """

    shares_loop = False
    block_limit = 10.0

    def __init__(
        self, spec: str, config: RunnerConfig, *, folder: str, reward: str = "", log: Path | None = None, host: str = ""
    ) -> None:
        self._spec = spec
        self._count = config.workers
        self._preload = config.preload
        self._reward = reward
        self._folder = folder
        self._log = Path(os.devnull) if log is None else log
        # Python's own hashing must not make one run of an agent differ from the next.
        environment = {"PYTHONHASHSEED": "0", **child_environment(), IN_AGENT: "1"}
        bypass_proxy(host, environment)
        self._python = config.python
        self._fork_server = ForkServer(self._log, folder, environment, self._python)
        self._trees: ProcessTrees | None = None
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []

    async def start(self) -> None:
        """Start the workers, the first one alone: if it cannot load the agent, none could, and nothing has begun."""
        try:
            open(self._log, "ab", opener=private).close()  # noqa: ASYNC230 - before anything runs
        except OSError as error:
            raise PlaceError(
                f"cannot write the runners' log {self._log}: {error.strerror}. Fix: choose another place"
            ) from None
        if self._python:
            await asyncio.to_thread(_try_out, self._python)
        self._trees = ProcessTrees()
        try:
            first = await self._start_worker()
            self._idle.append(first)
            if self._preload and first.is_forkable and self._count > 1:
                await self._fork_server.preload(self._what_to_import())
            others = (self._start_worker() for _ in range(self._count - 1))
            for started in await asyncio.gather(*others, return_exceptions=True):
                if isinstance(started, BaseException):
                    raise started
                self._idle.append(started)
        except BaseException:
            await self.close()
            raise

    async def run(self, job: Job, say: Say) -> Outcome:
        worker = await self._take_worker()
        try:
            outcome = await self._run_on(worker, job)
        except asyncio.CancelledError:
            await output.in_time(_tell(worker.take_output(), say))
            raise
        printed = worker.take_output()  # before it gets its next job
        if worker in self._workers:
            self._idle.append(worker)
        await _tell(printed, say)
        return outcome

    async def close(self) -> None:
        self._idle = []
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)))
        await self._fork_server.close()
        if self._trees is not None:
            await self._trees.close()

    async def _run_on(self, worker: Worker, job: Job) -> Outcome:
        try:
            return await worker.run(job)
        except GONE:
            await self._end(worker, job.llm.api_key)
            how = output.describe_end(await worker.exit_code())
            return Outcome(cause="lost_runner", detail=f"the agent's process died: {how}", clean=False)
        except BaseException:  # cancelled: too late, or not wanted any more
            await self._end(worker, job.llm.api_key)
            raise

    async def _take_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.is_gone:
                return worker
            await self._end(worker)  # it died while it had nothing to do
        return await self._start_worker()

    async def _start_worker(self) -> Worker:
        try:
            async with asyncio.timeout(START_LIMIT):
                child, connection = await self._fork_server.fork()
        except TimeoutError:
            raise AgentError(
                f"no worker process could be started within {START_LIMIT:g} s. Fix: try fewer with runner.workers"
            ) from None
        streams = await asyncio.open_connection(sock=connection)
        worker = self._make_worker(child, f"{self._folder}/{child.pid}.out", *streams)
        self._workers.add(worker)
        try:
            error = await self._load(worker)
        except BaseException:
            await self._end(worker)
            raise
        if error is not None:
            await self._end(worker)
            raise AgentError(error)
        return worker

    def _what_to_import(self) -> worker_messages.Preload:
        path = [] if self._python else sys.path
        return worker_messages.Preload(
            agent=self._spec, reward=self._reward, sys_path=path, shares_loop=self.shares_loop
        )

    def _make_worker(self, *given: Any) -> Worker:
        return Worker(*given)

    async def _load(self, worker: Worker) -> str | None:
        what = msgspec.structs.asdict(self._what_to_import())
        start = worker_messages.Start(**what, output=worker.file, cookie=worker.cookie, block_limit=self.block_limit)
        try:
            async with asyncio.timeout(START_LIMIT):
                return await worker.load(start)
        except TimeoutError:
            return f"agent: importing {self._spec} took more than {START_LIMIT:g} s: do slow work in the agent itself"
        except GONE:
            how = output.describe_end(await worker.exit_code())
            return f"agent: the process that imports {self._spec} died: {how}; look into the runners' log"

    async def _end(self, worker: Worker, cookie: str = "") -> None:
        """End a worker and everything its agent started, in whose environment `cookie` stands."""
        assert self._trees is not None
        self._workers.discard(worker)
        try:
            if not worker.is_gone:
                self._trees.add(worker.pid, cookie)
                await self._trees.end(worker.pid)
            elif cookie:  # its number may belong to someone else by now; its group was ended when it was
                await asyncio.to_thread(kill_leftovers, cookie)
        finally:
            worker.close()


class Worker:
    """Our side of one worker process."""

    def __init__(
        self, child: ForkedWorker, file: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = child.pid
        self.file = file
        self.is_forkable = False
        self.cookie = secrets.token_hex(16)
        self._end = child.end
        self._printed = False
        self._reader = reader
        self._writer = writer

    async def load(self, start: worker_messages.Start) -> str | None:
        self._writer.write(worker_messages.pack(start))
        ready = await worker_messages.receive(self._reader, worker_messages.Ready)
        self.is_forkable = ready.is_forkable
        return ready.error

    async def run(self, job: Job) -> Outcome:
        self._printed = True  # until it says otherwise, which it may not live to do
        self._writer.write(worker_messages.pack(job))
        done = await worker_messages.receive(self._reader, worker_messages.JobDone)
        self._printed = done.printed
        return done.outcome

    def take_output(self) -> list[dict[str, Any]]:
        """What its last job printed, as the data of events."""
        if not self._printed:
            return []
        try:
            with open(self.file, "rb") as file:
                kept, size = bytearray(file.read(KEPT)), os.fstat(file.fileno()).st_size
        except FileNotFoundError:  # it never began
            return []
        # A new file for the next job: what a child that outlives this one prints must not get into it.
        os.unlink(self.file)
        dropped = size - len(kept)
        said = [output.make_message("output", text) for text in output.take(kept, last=True)]
        return [*said, output.make_dropped_message("output", dropped)] if dropped else said

    async def exit_code(self) -> int | None:
        """How it went, now that it is gone: its exit code, or minus the signal that killed it; None if nobody knows."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._end), 5.0)
        return None

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


def _try_out(python: str) -> None:
    """Whether another environment's Python can run agents at all: what it says when it cannot is told in time."""
    begin = "import strop; from strop.runners import forkserver; forkserver.prepare(); print(strop.__version__)"
    code = f"import sys; sys.path[:0] = {source_path()!r}; {begin}"
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=START_LIMIT,
            check=False,
            env=child_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(
            f"runner.python: {python} cannot be run ({error}). Fix: name an environment's python"
        ) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        here = f"{python} -m pip install -e {Path(source[0]).parent}" if (source := source_path()) else ""
        fix = here or f"install strop {__version__} there, from where this one came"
        raise AgentError(f"runner.python: {python} cannot run agents: {said}. Fix: {fix}")
    if (there := done.stdout.split()[-1]) != __version__:
        raise AgentError(
            f"runner.python: {python} has strop {there}, and this is {__version__}. Fix: install the same there"
        )


async def _tell(printed: list[dict[str, Any]], say: Say) -> None:
    for data in printed:
        await say("message", data)
