"""An agent that is a command, in any language.

    task (JSON) ──stdin, and the file $STROP_TASK──▶ program ──model calls──▶ $OPENAI_BASE_URL, $ANTHROPIC_BASE_URL
                                                        ├──stdout, stderr──▶ events, as they come
                                                        ├──last line of stdout──▶ the answer
                                                        └──exit code──▶ whether it succeeded

The answer is the last line of stdout that is not empty, if it is JSON, otherwise all of stdout as text. A reward
function gets it, whatever it is. Without one, a number, an object of numbers or a list of {"name", "value"} is the
reward; anything else is none, which is not an error: events may have given one.

    exit code                   what it means
    0                           it has succeeded
    75 (EX_TEMPFAIL)            try me again: `lost_runner`
    137, or killed by SIGKILL   the machine ran out of memory, or the like: `lost_runner`
    anything else               it has failed: `agent_error`, with the last lines of stderr

Nothing of a program is left when it has ended: daemons and whatever else it started are killed (`tree`), also when this
process is killed itself. Left out: a terminal, and a shell (write sh -c '...' for one).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Coroutine
from typing import IO, Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from strop.agent.llm import bypass_proxy
from strop.errors import AgentError
from strop.net.process_group import ProcessTrees
from strop.net.secrets import child_environment
from strop.runners import output
from strop.runners.base import Agent, Job, Outcome, Say
from strop.runners.output import KEPT, PIECE
from strop.runners.rewards import RewardFunction, compute_outcome, is_rewards, load_reward_function
from strop.runners.task_file import write_task

T = TypeVar("T")

EVERY = 0.5
"""Seconds after which output is told that does not fill an event."""
DRAIN = 2.0
"""Seconds to wait for the end of the output once all that could write to it was killed."""
TRY_AGAIN = 75
KILLED = 128 + signal.SIGKILL
"""What a shell says when its command was killed."""
MEANING = {
    None: "it did not end when it was killed",
    TRY_AGAIN: f"exit code {TRY_AGAIN} (it asks to be tried again)",
    KILLED: f"exit code {KILLED} (killed by SIGKILL)",
    126: "exit code 126 (a program that it calls cannot be executed)",
    127: "exit code 127 (a program that it calls was not found)",
}
SHORT_OF = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO}


class CommandAgent(Agent):
    """The command line `command`, once per job. `reward` names the reward function.

    >>> CommandAgent("python agent.py --fast").words
    ['python', 'agent.py', '--fast']
    """

    def __init__(self, command: str, *, reward: str = "") -> None:
        self._reward = reward
        self._reward_function: RewardFunction | None = None
        self._trees: ProcessTrees | None = None
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise AgentError(f"agent: the command {command!r} cannot be split into words: {error}") from None
        if not self.words:
            raise AgentError("agent: the command is empty. Fix: write a program and its arguments")

    async def start(self) -> None:
        _check(self.words[0])
        self._reward_function = load_reward_function(self._reward)
        self._trees = ProcessTrees()

    async def close(self) -> None:
        if self._trees is not None:
            await self._trees.close()
            self._trees = None

    async def run(self, job: Job, say: Say) -> Outcome:
        trees = self._trees
        assert trees is not None, "not started"
        try:
            process = self._begin(job)
        except OSError as error:
            cause = "lost_runner" if error.errno in SHORT_OF else "agent_error"
            return Outcome(cause=cause, detail=f"{self.words[0]} could not be started: {error.strerror or error}")
        trees.add(process.pid, job.llm.api_key)
        streams = _Streams()
        try:
            await _run_to_end(streams.connect(process, msgspec.json.encode(job.llm.task)))
            await _follow(process, streams, say)
        except BaseException as error:
            await _run_to_end(_end(process, streams, trees))
            if isinstance(error, asyncio.CancelledError):
                await output.in_time(streams.tell(say, last=True))
            raise
        killed = await _run_to_end(_end(process, streams, trees))
        await streams.tell(say, last=True)
        outcome = await self._outcome(process.returncode, streams, job)
        return msgspec.structs.replace(outcome, clean=killed == 0)

    def _begin(self, job: Job) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.words,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=_environment(job, write_task(job)),
        )

    async def _outcome(self, code: int | None, streams: _Streams, job: Job) -> Outcome:
        if code == 0:
            answer = _answer(streams.out.end())
            meant = self._reward_function is not None or is_rewards(answer)
            return await compute_outcome(answer if meant else None, job, self._reward_function)
        how = MEANING.get(code) or output.describe_end(code)
        if words := _last_lines(streams.err.end()) or _last_lines(streams.out.end()):
            how = f"{how}: {words}"
        lost = code is None or code in (TRY_AGAIN, KILLED, -signal.SIGKILL)
        return Outcome(cause="lost_runner" if lost else "agent_error", detail=how)


def _check(program: str) -> None:
    if shutil.which(program) is not None:
        return
    if os.path.isfile(program):
        fix = f"chmod +x {program}, or write the interpreter before it" if "/" in program else f"write ./{program}"
        raise AgentError(f"agent: {program} cannot be executed: {fix}")
    raise AgentError(
        f"agent: there is no program {program!r}. Fix: check its name and $PATH, or write sh -c '...' for shell syntax"
    )


def _environment(job: Job, task_file: str) -> dict[str, str]:
    # Python's own hashing must not make one run of an agent differ from the next, and what it printed before it was
    # killed must not be lost.
    environment = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **child_environment()}
    bypass_proxy(urlsplit(job.llm.base_url).hostname or "", environment)
    return environment | job.llm.environment(task_file)


async def _follow(process: subprocess.Popen[bytes], streams: _Streams, say: Say) -> None:
    """Tell what it prints until it has ended."""
    ended = asyncio.create_task(_exit(process))
    ended.add_done_callback(lambda _: streams.news.set())
    try:
        while not ended.done():
            await streams.news.wait()
            streams.news.clear()
            await streams.tell(say)
        ended.result()
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def _exit(process: subprocess.Popen[bytes]) -> None:
    """Returns when it has ended. It is not reaped, so that its number stays its own."""
    try:
        file = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # no Linux, or no recent one: here it is reaped
        while process.poll() is None:  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0.05)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(file, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(file)
        os.close(file)


async def _end(process: subprocess.Popen[bytes], streams: _Streams, trees: ProcessTrees) -> int:
    """Kill whatever is left of it, hear its last words, reap it. Says how many processes had to be killed."""
    try:
        return await trees.end(process.pid)
    finally:
        await streams.close()
        process.poll()


async def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Its result. It is brought to its end even if we are cancelled meanwhile; that is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


# -- what it prints ------------------------------------------------------------------------------------------------


class _Streams:
    """A program's stdin, stdout and stderr. `news` is set when there is something to tell."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.out = _Output("stdout", self.news.set)
        self.err = _Output("stderr", self.news.set)
        self._input = _Input()
        self._outputs: list[asyncio.ReadTransport] = []

    async def connect(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        """Send `message` as its input, and take what it prints."""
        loop = asyncio.get_running_loop()
        for pipe, stream in ((process.stdout, self.out), (process.stderr, self.err)):
            transport, _ = await loop.connect_read_pipe(lambda stream=stream: stream, cast("IO[bytes]", pipe))
            self._outputs.append(transport)
        transport, _ = await loop.connect_write_pipe(lambda: self._input, cast("IO[bytes]", process.stdin))
        transport.write(message)  # a program that does not read it closes the pipe, which hurts nobody
        transport.write_eof()

    async def tell(self, say: Say, *, last: bool = False) -> None:
        for stream in (self.out, self.err):
            await stream.tell(say, last)

    async def close(self) -> None:
        await asyncio.wait([self.out.closed, self.err.closed], timeout=DRAIN)
        for transport in self._outputs:
            transport.close()
        if self._input.transport is not None:
            self._input.transport.abort()


class _Input(asyncio.BaseProtocol):
    """Knows its transport while that is open: asyncio's cannot be aborted after its end."""

    transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None


class _Output(asyncio.Protocol):
    """One stream: its beginning goes out in pieces, its end is kept, and what lies between is counted."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self._name = name
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._pending = bytearray()
        self._tail = bytearray()
        self._taken = 0
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * KEPT:
            del self._tail[:-KEPT]
        kept = data[: KEPT - self._taken]
        self._pending += kept
        self._taken += len(kept)
        self._dropped += len(data) - len(kept)
        if len(self._pending) >= PIECE:
            self._wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._wake)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def end(self) -> str:
        """The last of it, as text."""
        return output.decode(self._tail[-KEPT:])

    async def tell(self, say: Say, last: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for text in output.take(self._pending, last=last):
            await say("message", output.make_message(self._name, text))
        if last and self._dropped:
            await say("message", output.make_dropped_message(self._name, self._dropped))


def _answer(printed: str) -> Any:
    """
    >>> _answer('thinking ...\\n{"reward": 0.5}\\n\\n'), _answer("The answer\\nis 12.")
    ({'reward': 0.5}, 'The answer\\nis 12.')
    """
    printed = printed.strip()
    try:
        return json.loads(printed.rpartition("\n")[2])  # unlike others it reads NaN, which then is refused by name
    except (ValueError, RecursionError):
        return printed


def _last_lines(printed: str) -> str:
    return "\n".join(printed.strip().splitlines()[-20:])[-2000:]
