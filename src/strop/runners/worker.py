"""One worker process: it runs one agent at a time and says what came of it.

A worker leads a process group of its own, so that ending the group also ends whatever the agent started. It ends
itself, in the middle of an agent if need be, as soon as its connection closes: a runner that is killed leaves nothing
behind. What is printed while an agent runs, by it or by its children, goes into a file of the worker's own.

Files are used again where they can be: to make one, in a folder that hundreds of workers share, takes longer than
everything else that a worker does for a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import msgspec

from strop.agent.functions import is_async, run_until_done
from strop.errors import AgentError, BadReward, StropError
from strop.imports import resolve, with_fix
from strop.runners import forkable, rollout_context
from strop.runners.base import Job, Outcome
from strop.runners.rewards import RewardFunction, compute_outcome_now, last_lines, load_reward_function
from strop.runners.task_file import write_task
from strop.runners.worker_messages import JobDone, Preload, Ready, Start, pack, receive_bytes

Function = Callable[..., Any]
COOKIE = "STROP_WORKER"
"""The variable by which what a worker's agents started is found when it is ended."""


def serve(connection: socket.socket) -> None:
    """The life of a worker: load the agent, then run jobs until nobody is there to give them."""
    threading.Thread(target=_watch, args=(connection,), name="strop-worker-watch", daemon=True).start()
    start = msgspec.json.decode(receive(connection), type=Start)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # or what is buffered is lost when the worker is killed
    before = forkable.look()
    try:
        agent, reward_function = load(start)
    except StropError as error:
        connection.sendall(pack(Ready(error=str(error))))
        return
    connection.sendall(pack(Ready(is_forkable=forkable.is_unchanged(before))))
    reseed()
    if start.shares_loop:
        from strop.runners import loop_worker

        os.environ[COOKIE] = start.cookie
        loop_worker.serve(connection, agent, reward_function, start.block_limit)
    worker, output = os.getpid(), OutputFile(start.output)
    while True:
        job = msgspec.json.decode(receive(connection), type=Job)
        with output.collect():
            outcome = run(agent, job, reward_function)
            if os.getpid() != worker:  # a child that the agent forked and that came back: the answer is not its to give
                os._exit(0)
        connection.sendall(pack(JobDone(outcome=outcome, printed=not output.keep_if_unused())))


def receive(connection: socket.socket) -> bytes:
    """The next message. Whoever is to send it being gone ends this process."""
    if (message := receive_bytes(connection)) is None:
        end_group()
    return message


def _watch(connection: socket.socket) -> None:
    """Notice the end of the connection while an agent runs. Messages wake up nobody here."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))  # a hang-up is told of in any case
    while not poll.poll():
        pass
    end_group()


def end_group() -> NoReturn:
    """End this process, and what its agents started with it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


class OutputFile:
    """The file that takes what is printed. Whoever reads it takes it away; one that nobody has used stays."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._watched: int | None = None  # the file that is there, opened once more

    @contextlib.contextmanager
    def collect(self) -> Generator[None]:
        """Whatever is printed meanwhile, by Python, by libraries or by child processes, goes to the file."""
        file = self._open()
        before = [os.dup(1), os.dup(2)]
        _flush()
        for fd in (1, 2):
            os.dup2(file, fd)
        os.close(file)
        try:
            yield
        finally:
            _flush()
            for fd, old in enumerate(before, 1):
                os.dup2(old, fd)
                os.close(old)

    def _open(self) -> int:
        """The file that is there, or a new one: somebody who clears folders of old files may have taken it."""
        if self._watched is not None:
            with contextlib.suppress(OSError):
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
                if os.path.sameopenfile(file, self._watched):
                    return file
                os.close(file)
            os.close(self._watched)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._watched = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def keep_if_unused(self) -> bool:
        """Whether nothing was printed, and nobody is left who could: then the next job takes the same file. One that
        the agent has moved, linked or replaced is not the same."""
        assert self._watched is not None
        about = os.fstat(self._watched)
        if about.st_size == 0 and about.st_nlink == 1 and self._is_there(about) and _is_opened_once(self._watched):
            return True
        os.close(self._watched)
        self._watched = None
        return False

    def _is_there(self, about: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), about)
        except OSError:
            return False


def _is_opened_once(file: int) -> bool:
    """Whether no other process, nor the agent, has the file open for writing: only then is a write lease granted."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # somebody has, or the file system knows no leases
        return False
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # an agent may have closed it or put in its own
            stream.flush()


def load(given: Preload) -> tuple[Function, RewardFunction | None]:
    """The agent and the reward function. Raises `AgentError` if one cannot be had."""
    sys.path[:] = given.sys_path or sys.path  # none where this is another environment's Python
    if given.shares_loop:
        rollout_context.install()
    agent = load_agent(given.agent)
    if given.shares_loop and not is_async(agent):
        raise AgentError(
            f'agent: {given.agent} is not async. Fix: write it as `async def`, or set runner.agents_in to "processes"'
        )
    return agent, load_reward_function(given.reward)


def reseed() -> None:
    """Workers that were forked with numpy in them would all draw the same numbers. Python's own are taken care of."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def load_agent(spec: str) -> Function:
    agent = resolve(spec, "agent")
    if not callable(agent):
        raise AgentError(
            f"agent: {spec} is {type(agent).__name__}, not a function. Fix: name one that takes (task, llm)"
        )
    return agent


def run(agent: Function, job: Job, reward_function: RewardFunction | None = None) -> Outcome:
    """Run the agent on one job, in surroundings made for it."""
    task_file = write_task(job)
    random.seed(job.seed)  # an agent that draws its own numbers draws the same ones when a run is repeated
    with _environment(job.llm.environment(task_file)):
        return call(agent, job, reward_function)


def call(agent: Function, job: Job, reward_function: RewardFunction | None = None) -> Outcome:
    """What the agent comes to. Whatever it does wrong is an outcome, never an exception."""
    try:
        return compute_outcome_now(run_until_done(agent(job.llm.task, job.llm)), job, reward_function)
    except BaseException as error:  # sys.exit in an agent must not end its worker
        return make_failed_outcome(error)


def make_failed_outcome(error: BaseException) -> Outcome:
    """What an agent that raised came to."""
    if isinstance(error, BadReward):
        return Outcome(cause="bad_reward", detail=str(error))
    said = last_lines(error)
    return Outcome(cause="agent_error", detail=with_fix(said) if isinstance(error, ModuleNotFoundError) else said)


@contextlib.contextmanager
def _environment(given: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
