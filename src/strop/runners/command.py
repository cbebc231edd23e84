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
process is killed itself. With `runner.container` each rollout's program is in a container (`containers/`), and all of
this holds there too. Left out: a terminal, and a shell (write sh -c '...' for one).
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
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from strop.agent.llm import bypass_proxy
from strop.config import ContainerConfig
from strop.errors import AgentError
from strop.net.process_group import ProcessTrees
from strop.net.secrets import child_environment
from strop.runners import output
from strop.runners.base import Agent, Job, Outcome, Say
from strop.runners.containers.base import TASK_FILE, Containers, Enclosed
from strop.runners.containers.choose import choose
from strop.runners.rewards import RewardFunction, compute_outcome, is_rewards, load_reward_function
from strop.runners.streams import Streams
from strop.runners.task_file import write_task

T = TypeVar("T")

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
    """The command line `command`, once per job. `reward` names the reward function, `container` says whether it runs in
    containers, which show nothing of the folders `private`.

    >>> CommandAgent("python agent.py --fast").words
    ['python', 'agent.py', '--fast']
    """

    def __init__(
        self,
        command: str,
        *,
        reward: str = "",
        container: ContainerConfig | None = None,
        private: Sequence[Path] = (),
    ) -> None:
        self._reward = reward
        self._container = container or ContainerConfig()
        self._private = private
        self._containers: Containers | None = None
        self._reward_function: RewardFunction | None = None
        self._trees: ProcessTrees | None = None
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise AgentError(f"agent: the command {command!r} cannot be split into words: {error}") from None
        if not self.words:
            raise AgentError("agent: the command is empty. Fix: write a program and its arguments")

    async def start(self) -> None:
        if self._container.runtime:
            self._containers = await choose(self._container, self._private)
            await self._containers.start(self.words[0])
        else:
            _check(self.words[0])
        self._reward_function = load_reward_function(self._reward)
        self._trees = ProcessTrees()

    async def close(self) -> None:
        if self._trees is not None:
            await self._trees.close()
            self._trees = None
        if self._containers is not None:
            await self._containers.close()

    async def run(self, job: Job, say: Say) -> Outcome:
        trees = self._trees
        assert trees is not None, "not started"
        try:
            process, enclosed = self._begin(job)
        except OSError as error:
            cause = "lost_runner" if error.errno in SHORT_OF else "agent_error"
            return Outcome(cause=cause, detail=f"{self.words[0]} could not be started: {error.strerror or error}")
        trees.add(process.pid, job.llm.api_key)
        streams = Streams()
        too_much = ""
        try:
            await _run_to_end(streams.connect(process, msgspec.json.encode(job.llm.task)))
            too_much = await self._follow(process, streams, say)
        except BaseException as error:
            await _run_to_end(self._end(process, enclosed, streams, trees))
            if isinstance(error, asyncio.CancelledError):
                await output.in_time(streams.tell(say, last=True))
            raise
        killed = await _run_to_end(self._end(process, enclosed, streams, trees))
        await streams.tell(say, last=True)
        outcome = await self._outcome(process.returncode, streams, job, too_much)
        # What else was in a container died with it, uncounted: calls of it may be in flight.
        return msgspec.structs.replace(outcome, clean=killed == 0 and enclosed is None)

    def _begin(self, job: Job) -> tuple[subprocess.Popen[bytes], Enclosed | None]:
        task_file = write_task(job)
        if self._containers is None:
            return _start(self.words, _environment(job, task_file, child_environment())), None
        environment = _environment(job, TASK_FILE, {})
        enclosed = self._containers.enclose(self.words, environment, task_file)
        try:
            return _start(enclosed.words, enclosed.environment, enclosed.files), enclosed
        finally:
            enclosed.close()

    async def _follow(self, process: subprocess.Popen[bytes], streams: Streams, say: Say) -> str:
        """Tell what it prints until it has ended. Returns why its container was ended, if it was."""
        if self._containers is None:
            await _follow(process, streams, say)
            return ""
        watching = asyncio.create_task(self._containers.watch(process.pid))
        try:
            await _follow(process, streams, say)
            return watching.result() if watching.done() else ""
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _end(
        self, process: subprocess.Popen[bytes], enclosed: Enclosed | None, streams: Streams, trees: ProcessTrees
    ) -> int:
        """Kill whatever is left of it, hear its last words, reap it. Says how many processes had to be killed."""
        try:
            killed = await trees.end(process.pid)
            if self._containers is not None and enclosed is not None:
                await self._containers.end(enclosed, process.poll())
            return killed
        finally:
            await streams.close()
            process.poll()

    async def _outcome(self, code: int | None, streams: Streams, job: Job, too_much: str) -> Outcome:
        if self._containers is not None:
            code = _read_code(code)
        if code == 0:
            answer = _answer(streams.out.end())
            meant = self._reward_function is not None or is_rewards(answer)
            return await compute_outcome(answer if meant else None, job, self._reward_function)
        words = _last_lines(streams.err.end()) or _last_lines(streams.out.end())
        container_failed = too_much or (self._containers.explain(code, words) if self._containers is not None else "")
        how = container_failed or MEANING.get(code) or output.describe_end(code)
        if words:
            how = f"{how}: {words}"
        lost = container_failed or code is None or code in (TRY_AGAIN, KILLED, -signal.SIGKILL)
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


def _start(words: list[str], environment: dict[str, str], files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment,
        pass_fds=files,
    )


def _read_code(code: int | None) -> int | None:
    """A container says as shells do which signal killed its program.

    >>> _read_code(139), _read_code(75), _read_code(-9)
    (-11, 75, -9)
    """
    return 128 - code if code is not None and 128 < code <= 128 + signal.SIGRTMAX else code


def _environment(job: Job, task_file: str, around: Mapping[str, str]) -> dict[str, str]:
    # Python's own hashing must not make one run of an agent differ from the next, and what it printed before it was
    # killed must not be lost.
    environment = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **around}
    bypass_proxy(urlsplit(job.llm.base_url).hostname or "", environment)
    return environment | job.llm.environment(task_file)


async def _follow(process: subprocess.Popen[bytes], streams: Streams, say: Say) -> None:
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
