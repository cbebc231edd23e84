"""Async Python agents in event loops of a few worker processes, which many rollouts share.

    run ──RunJob──▶ the worker with the fewest rollouts ──▶ agents ──▶ gateway
        ◀──Said, PrintedText ... Finished──┘

It is for agents that mostly wait for the model: a rollout costs a task instead of a process. Every rollout has its own
`llm`, variables (`os.environ`), output and time limit. What cannot be had apart: an agent that blocks the loop holds up
those it shares it with, a worker that dies takes them along (`lost_runner`, and they are tried again), and processes
that agents start end with the worker. One that blocks the loop for `BLOCK_LIMIT` seconds fails, and its worker is
replaced; where one does not stop when it is told to, that happens when the others are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
from typing import Any

from strop.config import RunnerConfig
from strop.errors import StropError
from strop.runners import output, worker_messages
from strop.runners.base import Job, Outcome, Say
from strop.runners.loop_worker import GRACE
from strop.runners.output import KEPT
from strop.runners.python import GONE, ProcessAgent, Worker
from strop.runners.worker_messages import Blocked, Finished, FromLoop, PrintedText, RunJob, Said, StopJob, Stuck

BLOCK_LIMIT = 10.0
"""Seconds for which an agent may block the loop that it shares."""
ANSWER = 2 * GRACE
"""Seconds after which a worker that was told to stop a rollout, and says nothing, counts as blocked."""


class LoopsAgent(ProcessAgent):
    """The function `spec`, in `config.loops` processes. The rest is as for `ProcessAgent`."""

    shares_loop = True

    @property
    def block_limit(self) -> float:
        return BLOCK_LIMIT

    def __init__(self, spec: str, config: RunnerConfig, *, folder: str, **given: Any) -> None:
        super().__init__(spec, config, folder=folder, **given)
        self._count = config.loops or min(os.cpu_count() or 1, math.ceil(config.workers / 16))
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    async def run(self, job: Job, say: Say) -> Outcome:
        worker = await self._choose_worker()
        rollout = _SharedRollout(next(self._numbers), worker, say)
        try:
            return await rollout.run(job)
        except GONE:
            await self._end_if_over(worker)
            how = output.describe_end(await worker.exit_code())
            return Outcome(cause="lost_runner", detail=f"the agent's process died: {how}", clean=False)
        except BaseException:  # cancelled, or the store does not take what the agent said
            await rollout.stop()
            raise
        finally:
            worker.rollouts.pop(rollout.number, None)
            await output.in_time(rollout.tell_printed())
            await self._end_if_over(worker)

    async def _end_if_over(self, worker: LoopWorkerLink) -> None:
        is_over = worker.is_gone or worker.is_blocked or (worker.is_retiring and not worker.rollouts)
        if is_over and worker in self._workers:
            await self._end(worker, worker.cookie)

    def _make_worker(self, *given: Any) -> Worker:
        return LoopWorkerLink(*given)

    async def _choose_worker(self) -> LoopWorkerLink:
        async with self._starting:
            usable = [
                worker
                for worker in self._workers
                if isinstance(worker, LoopWorkerLink)
                and not worker.is_gone
                and not (worker.is_retiring or worker.is_blocked)
            ]
            if len(usable) < self._count:
                worker = await self._start_worker()
                assert isinstance(worker, LoopWorkerLink)
                return worker
            return min(usable, key=lambda worker: len(worker.rollouts))


class LoopWorkerLink(Worker):
    """Our side of one worker process: it gives each message to the rollout that it is about."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rollouts: dict[int, asyncio.Queue[FromLoop | Exception]] = {}
        self.is_retiring = self.is_blocked = False
        self._listening: asyncio.Task[None] | None = None

    def send(self, message: RunJob | StopJob) -> None:
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        self._writer.write(worker_messages.pack(message))

    async def _listen(self) -> None:
        try:
            while True:
                message: FromLoop = await worker_messages.receive_from_loop(self._reader)
                if (inbox := self.rollouts.get(message.number)) is not None:
                    inbox.put_nowait(message)
                if isinstance(message, Blocked):
                    self.is_blocked = True
                    raise ConnectionAbortedError
        except GONE as error:
            for inbox in self.rollouts.values():
                inbox.put_nowait(error)

    def close(self) -> None:
        super().close()
        for inbox in self.rollouts.values():  # whoever is still there must not wait for ever
            inbox.put_nowait(ConnectionResetError())


class _SharedRollout:
    """One rollout in a worker that others use too."""

    def __init__(self, number: int, worker: LoopWorkerLink, say: Say) -> None:
        self.number = number
        self._worker, self._say = worker, say
        self._printed, self._dropped = bytearray(), 0
        self._inbox: asyncio.Queue[FromLoop | Exception] = asyncio.Queue()
        worker.rollouts[number] = self._inbox

    async def run(self, job: Job) -> Outcome:
        self._worker.send(RunJob(number=self.number, job=job))
        message = await self._hear()
        if isinstance(message, Finished):
            return message.outcome
        blocked = f"the agent blocked the event loop that it shares with others for {BLOCK_LIMIT:g} s"
        fix = "Fix: await what takes long, call it by asyncio.to_thread, or set runner.agents_in to processes"
        return Outcome(cause="agent_error", detail=f"{blocked}. {fix}", clean=False)

    async def stop(self) -> None:
        """Have it stopped, or the worker marked as one that cannot."""
        self._worker.send(StopJob(number=self.number))
        try:
            async with asyncio.timeout(ANSWER):
                while True:
                    with contextlib.suppress(StropError):  # what the store says of its last words is not what counts
                        self._worker.is_retiring |= isinstance(await self._hear(), Stuck)
                        return
        except TimeoutError:
            self._worker.is_blocked = True
        except GONE:
            return

    async def tell_printed(self) -> None:
        said = [output.make_message("output", text) for text in output.take(self._printed, last=True)]
        dropped = [output.make_dropped_message("output", self._dropped)] if self._dropped else []
        for data in (*said, *dropped):
            await self._say("message", data)

    async def _hear(self) -> Finished | Stuck | Blocked:
        """Record what the agent says, until it is over."""
        while True:
            match await self._inbox.get():
                case Said(kind=kind, data=data):
                    await self._say(kind, data)
                case PrintedText(text=text):
                    printed = text.encode(errors="replace")
                    kept = printed[: KEPT - len(self._printed)]
                    self._printed += kept
                    self._dropped += len(printed) - len(kept)
                case Exception() as error:
                    raise error
                case message:
                    return message
