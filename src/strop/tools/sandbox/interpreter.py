"""The outside end of one runner: what it is sent, how long it may take, what it prints, and its death.

Between calls nothing of it runs: the runner kills what a call has started, and is then stopped itself, with all its
threads, until the next one. Its word for it is not taken: a call has not ended before nothing runs any more. All of it
dies with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from msgspec import Struct

from strop.errors import StropError
from strop.net.process_group import list_descendants
from strop.tools.sandbox import jail, memory, seccomp
from strop.tools.sandbox.base import Ended
from strop.tools.sandbox.printed import MOST_PRINTED, Printed
from strop.tools.sandbox.runner import ANSWER, CELL, RAISED

STARTING = 60.0
"""Seconds that a start may take, on a machine that has much else to do."""
LOOK = 0.05
"""Seconds between looks at the memory."""
LOST = "All variables and files are lost; the next call starts afresh."


class SandboxLimits(Struct, frozen=True, kw_only=True):
    """What a session may use. See `PythonBox`."""

    seconds: float
    memory_mb: int
    disk_mb: int
    processes: int
    cpu_seconds: int
    output: int
    packages: tuple[str, ...]
    isolated: bool


class InterpreterGone(Exception):
    """The runner has ended, or its end of the socket has."""


class Interpreter:
    """`start` one, `run` code in it until that says that it is gone (`alive`), then `end` it."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.alive = True
        self._limits = limits
        self._folder = None if limits.isolated else tempfile.TemporaryDirectory(prefix="strop-python-")
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)
        out, self._into = os.pipe()
        self._printed = Printed(out, limits.output)
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: int | None = None
        self._jailers: list[int] = []

    @classmethod
    async def start(cls, limits: SandboxLimits) -> Interpreter:
        if limits.isolated:
            await asyncio.to_thread(jail.view, limits.packages)  # the first time it takes a while
        made = cls(limits)
        try:
            pid = await made._launch()
            async with asyncio.timeout(STARTING):
                await made._answer()
        except (InterpreterGone, TimeoutError):
            await made.end()
            raise StropError(f"the sandbox does not start: {made._printed.take().strip() or 'no answer'}") from None
        except BaseException:
            await made.end()
            raise
        with contextlib.suppress(AttributeError, OSError):  # no Linux, or an old one: it is not stopped between calls
            *made._jailers, runner = list_descendants(pid)
            made._handle = os.pidfd_open(runner)
        return made

    async def run(self, code: str) -> tuple[str, Ended]:
        """What the call printed and came to, and how it ended."""
        answer = asyncio.ensure_future(self._ask(code))
        try:
            ended = await self._watch(answer)
            if ended is None:
                kind, said = answer.result()
                text = _join(self._printed.take(), said)
                return text, "raised" if kind == RAISED else "done"
        except InterpreterGone:
            ended = "died"
        finally:
            if not answer.done() or answer.cancelled() or answer.exception():
                self.alive = False
                answer.cancel()
        why = await self._death() if ended == "died" else self._why(ended)
        await self.end()
        return _join(self._printed.take(), f"[{why} {LOST}]"), ended

    async def end(self) -> None:
        """Kill it with all it has started. The first process of the namespace dies with bubblewrap, and the rest of the
        namespace with that."""
        self.alive = False
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._printed.close()
        self._socket.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    async def _launch(self) -> int:
        """Start the process, in the thread that starts all of them: it takes milliseconds that the event loop may
        need. A start that is cancelled is finished first, so that what was started can be ended."""
        work = asyncio.get_running_loop().run_in_executor(_starter(os.getpid()), self._begin)
        try:
            process = await asyncio.shield(work)
            self._process = process
            return process.pid
        except asyncio.CancelledError:
            self._process = await work
            raise
        finally:
            self._theirs.close()
            os.close(self._into)

    def _begin(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        disk = limits.disk_mb << 20
        numbers = [limits.memory_mb << 20, limits.processes, disk, limits.cpu_seconds, limits.output]
        arguments = [str(number) for number in (jail.choose_user(), *numbers)]
        if self._folder is not None:
            arguments[0] = arguments[2] = "0"
            return self._popen([sys.executable, "-s", str(jail.RUNNER), *arguments], self._folder.name)
        with tempfile.TemporaryFile() as file:
            file.write(seccomp.build_filter())
            file.seek(0)
            words = jail.build_command(file.fileno(), disk, limits.packages, arguments)
            return self._popen(words, "/", file.fileno())

    def _popen(self, words: list[str], folder: str, *passed: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words,
            bufsize=0,
            stdin=self._theirs.fileno(),
            stdout=self._into,
            stderr=self._into,
            pass_fds=passed,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd=folder,
            start_new_session=True,
        )

    async def _ask(self, code: str) -> tuple[bytes, str]:
        self._signal("SIGCONT")
        self._printed.listen()
        said = code.encode(errors="backslashreplace")
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, CELL.pack(len(said)) + said)
        except OSError:
            raise InterpreterGone from None
        answer = await self._answer()
        await self._rest()
        return answer

    async def _rest(self) -> None:
        """Stop the runner, and wait until nothing of it runs. A cell may have given the answer in the runner's place
        and have processes that go on: then the call goes on too, until its time is over."""
        pause = 0.0002
        self._signal("SIGSTOP")
        while self._is_running() or self._is_running():  # twice: one may wake another after it was seen
            await asyncio.sleep(pause)
            pause = min(2 * pause, LOOK)
            self._signal("SIGSTOP")

    def _is_running(self) -> bool:
        if self._handle is None or self._process is None or self._folder is not None:  # not isolated: all may go on
            return False
        return memory.any_running(pid for pid in list_descendants(self._process.pid) if pid not in self._jailers)

    async def _answer(self) -> tuple[bytes, str]:
        kind, length = ANSWER.unpack(await self._read(ANSWER.size))
        if length > 8 * self._limits.output + 1000:  # nothing that the runner would say
            raise InterpreterGone
        return kind, (await self._read(length)).decode(errors="replace")

    async def _read(self, length: int) -> bytes:
        loop = asyncio.get_running_loop()
        got = b""
        while len(got) < length:
            try:
                part = await loop.sock_recv(self._socket, length - len(got))
            except OSError:
                part = b""
            if not part:
                raise InterpreterGone
            got += part
        return got

    async def _watch(self, answer: asyncio.Future[tuple[bytes, str]]) -> Ended | None:
        """None once there is an answer, or which limit it has passed."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.seconds
        while True:
            await asyncio.wait([answer], timeout=min(LOOK, max(deadline - loop.time(), 0)))
            if answer.done():
                return None
            if self._printed.total > MOST_PRINTED:
                return "output"
            if loop.time() >= deadline:
                return "timeout"
            if memory.exceeds(self._process.pid, self._limits.memory_mb << 20):
                return "memory"

    async def _death(self) -> str:
        assert self._process is not None
        for _ in range(100):
            if (code := self._process.poll()) is not None:
                return _cause(code)
            await asyncio.sleep(0.01)
        return "The interpreter cut itself off."

    def _why(self, ended: Ended | None) -> str:
        limits = self._limits
        return {
            "timeout": f"The call took longer than {limits.seconds:g} s and was stopped.",
            "memory": f"The call used more than {limits.memory_mb} MB of memory and was stopped.",
            "output": f"The call printed more than {MOST_PRINTED >> 20} MB and was stopped.",
        }[str(ended)]

    def _signal(self, name: str) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.Signals[name])


@lru_cache(maxsize=1)
def _starter(pid: int) -> ThreadPoolExecutor:
    """The thread that starts interpreters, which die with it: it lives as long as the process does."""
    return ThreadPoolExecutor(1, "strop-sandbox-start")


def _join(printed: str, said: str) -> str:
    """
    >>> _join("working\\n", "42"), _join("no line end", "42"), _join("printed\\n", "")
    ('working\\n42', 'no line end\\n42', 'printed')
    """
    between = "" if not printed or printed.endswith("\n") or not said else "\n"
    return (printed + between + said).rstrip("\n")


def _cause(code: int) -> str:
    """
    >>> _cause(139), _cause(3)
    ('The interpreter crashed (SIGSEGV).', 'The interpreter ended itself (exit code 3).')
    """
    number = -code if code < 0 else code - 128
    if number == signal.SIGXCPU:
        return "The interpreter used up its CPU time."
    try:
        return f"The interpreter crashed ({signal.Signals(number).name})."
    except ValueError:
        return f"The interpreter ended itself (exit code {code})."
