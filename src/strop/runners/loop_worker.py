"""A worker process whose event loop many rollouts of an `async` agent share (`runner.agents_in` "loops").

    RunJob ──▶ a task of the loop ──▶ Said, PrintedText ... Finished        for each rollout, by its number
    StopJob ──▶ the task is cancelled ──▶ Finished; or Stuck: it goes on all the same

A thread watches the loop: where it has not turned for `block_limit` seconds, it says which rollout is in the way
(Blocked). It cannot where that one holds the interpreter's lock all the while.

What a rollout has to itself is in `rollout_context`. Python's random numbers are everybody's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Coroutine
from typing import Any, NoReturn

import msgspec
import uvloop

from strop.agent.llm import LLM
from strop.runners import rollout_context, worker_messages
from strop.runners.base import Job, Outcome
from strop.runners.in_process import GRACE, LoopLLM
from strop.runners.rewards import RewardFunction, compute_outcome
from strop.runners.task_file import write_task
from strop.runners.worker import Function, make_failed_outcome, receive
from strop.runners.worker_messages import Blocked, Finished, FromLoop, PrintedText, RunJob, Said, StopJob, Stuck
from strop.types import EventKind


def serve(connection: socket.socket, agent: Function, reward: RewardFunction | None, block_limit: float) -> NoReturn:
    """Run jobs until nobody is there to give them, which ends the process."""
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_task_factory(_make_task)  # pyright: ignore[reportArgumentType] - uvloop's stubs know only generators
    shared = LoopWorker(connection, loop, agent, reward)

    threading.Thread(target=shared.watch, args=(block_limit,), name="strop-loop-watch", daemon=True).start()
    threading.Thread(target=shared.listen, name="strop-loop-listen", daemon=True).start()
    loop.run_forever()
    raise AssertionError("an agent stopped the event loop that it shares")


def _make_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **given: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **given)
    rollout_context.add_task(task)
    return task


class LoopWorker:
    """The rollouts of one worker, by their numbers."""

    def __init__(
        self,
        connection: socket.socket,
        loop: asyncio.AbstractEventLoop,
        agent: Function,
        reward: RewardFunction | None,
    ) -> None:
        self._connection, self._loop, self._agent, self._reward = connection, loop, agent, reward
        self._sending = threading.Lock()
        self._process = os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._surrounds: dict[int, rollout_context.Surrounds] = {}

    def listen(self) -> NoReturn:
        """Hand the loop what comes for it, from a thread of its own."""
        while True:
            message = msgspec.json.decode(receive(self._connection), type=RunJob | StopJob)
            self._loop.call_soon_threadsafe(self._follow, message)

    def _follow(self, message: RunJob | StopJob) -> None:
        if isinstance(message, RunJob):
            self._tasks[message.number] = self._loop.create_task(self._run(message.number, message.job))
        elif (task := self._tasks.get(message.number)) is not None:
            task.cancel()
            self._loop.call_later(GRACE, self._check, message.number)

    def send(self, message: FromLoop) -> None:
        if os.getpid() != self._process:  # a child that an agent forked: the answer is not its to give
            os._exit(0)
        with self._sending:  # agents print from threads too
            self._connection.sendall(worker_messages.pack(message))

    def watch(self, limit: float) -> None:
        """Say once that the loop is blocked."""
        while True:
            turned = threading.Event()
            self._loop.call_soon_threadsafe(turned.set)
            if not turned.wait(limit):
                return self.send(Blocked(number=self._find_current()))
            time.sleep(limit / 4)

    def _find_current(self) -> int:
        """Whose task the loop is in, asked from another thread."""
        task = asyncio.current_task(self._loop)
        for number, surrounds in list(self._surrounds.items()):
            if task is not None and (task is self._tasks.get(number) or task in surrounds.tasks):
                return number
        return -1

    def _check(self, number: int) -> None:
        if number in self._tasks:
            self.send(Stuck(number=number))

    async def _run(self, number: int, job: Job) -> None:
        """One rollout, whose end is told whatever happens: nobody else would."""
        try:
            outcome = await self._run_in_context(number, job)
        except BaseException as error:
            outcome = make_failed_outcome(error)
        finally:
            self._tasks.pop(number, None)
            self._surrounds.pop(number, None)
        self.send(Finished(number=number, outcome=outcome))

    async def _run_in_context(self, number: int, job: Job) -> Outcome:
        task_file = write_task(job)
        given = {name: getattr(job.llm, name) for name in LLM.__struct_fields__}
        job = msgspec.structs.replace(job, llm=LoopLLM(**given, outbox=_Outbox(number, self)))
        surrounds = rollout_context.Surrounds(
            say_printed=lambda text: self.send(PrintedText(number=number, text=text)),
            variables=dict[str, str | None](job.llm.environment(task_file)),
        )
        self._surrounds[number] = surrounds
        with rollout_context.entered(surrounds):
            outcome = await self._call(job)
        for left in surrounds.tasks:
            left.cancel()
        return outcome

    async def _call(self, job: Job) -> Outcome:
        """What the agent came to. Nothing may escape from here: sys.exit in a task would end the loop."""
        try:
            return await compute_outcome(await self._agent(job.llm.task, job.llm), job, self._reward)
        except BaseException as error:
            return make_failed_outcome(error)


class _Outbox:
    """Takes the events of one rollout, from any thread."""

    def __init__(self, number: int, worker: LoopWorker) -> None:
        self._number, self._worker = number, worker

    def put(self, kind: EventKind, data: dict[str, Any]) -> None:
        self._worker.send(Said(number=self._number, kind=kind, data=data))
