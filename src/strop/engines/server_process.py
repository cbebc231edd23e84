"""An engine's server: a program that is started, watched and ended by us, or somebody else's that only has a URL.

    server = launcher.make(ServerProgram(...))             or     ExternalServer("sglang", url)
    await server.start()       returns once it answers; its address is `server.url`
    how = await server.wait_until_gone()  returns once it does not any more, and says how it ended
    await server.end()         it may be started again

A program of ours listens on a free port, drawn anew at every start: a loopback one, where a cluster's launcher
(cluster/servers.py) does not start it on another machine. It leads a process group, and all that it starts ends with
it, or with us, however we end.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from strop.errors import EngineError
from strop.files import private
from strop.net.client import Client
from strop.net.process_group import ProcessTrees
from strop.net.secrets import child_environment

LOOPBACK = "127.0.0.1"
POLL = 0.25
"""Seconds between two looks at a server that is starting."""
WATCH, MISSED = 1.0, 3
"""Seconds between two looks at somebody else's server, and how many in a row must fail until it counts as gone."""


class ServerProgram(Struct, frozen=True, kw_only=True):
    """How a server is started. `command` has the words that follow Python's, anew at every start; where to listen is
    added to them. `python` is empty for the one that runs this; `env` is added to the environment, without what is None
    in it. What it prints goes to `log`, one start after the other. `timeout` are seconds until it must answer,
    `settings` is where all this was set, and `gpus` is how many it computes on, where there are any."""

    name: str
    command: Callable[[], Sequence[str]]
    log: Path
    env: Mapping[str, str | None]
    timeout: float
    settings: str
    python: str = ""
    gpus: int = 1


class EngineServer(ABC):
    """A server, wherever it is. `ours`: `end` ends it, so that the next start is a fresh one."""

    ours: ClassVar[bool] = True
    url: str

    @abstractmethod
    async def start(self) -> None:
        """Returns once it answers. Raises `EngineError` with the reason if it does not within the time allowed."""

    @abstractmethod
    async def wait_until_gone(self) -> str:
        """Returns once it does not answer any more, and says how it ended."""

    @abstractmethod
    async def end(self) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """The same for good."""


class ServerLauncher:
    """Where servers are started: on this machine. `elsewhere`: each gets its GPUs by who starts it."""

    elsewhere: ClassVar[bool] = False

    def make(self, program: ServerProgram) -> EngineServer:
        """Not started yet."""
        return ServerProcess(program)


class ExternalServer(EngineServer):
    """A server that somebody else started, and starts again if it dies. `setting` is where its address was given."""

    ours = False

    def __init__(self, name: str, url: str, *, timeout: float, setting: str) -> None:
        self.url = url
        self._name, self._timeout, self._setting = name, timeout, setting

    async def start(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout
        while not await is_answering(self.url):
            if asyncio.get_running_loop().time() > deadline:
                where = f"no {self._name} answers at {self.url} within {self._timeout:g} s"
                raise EngineError(f"{where}. Fix: start it, or correct {self._setting}")
            await asyncio.sleep(min(WATCH, self._timeout))

    async def wait_until_gone(self) -> str:
        missed = 0
        while missed < MISSED:
            await asyncio.sleep(WATCH)
            missed = 0 if await is_answering(self.url) else missed + 1
        return f"{self._name} at {self.url} does not answer any more"

    async def end(self) -> None: ...

    async def close(self) -> None: ...


class ServerProcess(EngineServer):
    """A program of ours, a child of this process. It listens at `host`, an address of this machine's. `apart`: see
    `ProcessTrees`."""

    def __init__(self, program: ServerProgram, host: str = LOOPBACK, *, apart: bool = False) -> None:
        self.url = ""
        self._program, self._host, self._apart = program, host, apart
        self._name, self._log, self._settings = program.name, program.log, program.settings
        self._trees: ProcessTrees | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[str] | None = None  # how
        self._from = 0  # where in the log the present start begins

    @property
    def pid(self) -> int:
        """0: it is not running."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        await self.end()
        host, port = self._host, free_port(self._host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        python = self._program.python or sys.executable
        ended = self._spawn([python, *self._program.command(), "--host", host, "--port", str(port)])
        deadline = asyncio.get_running_loop().time() + self._program.timeout
        while not await is_answering(self.url):
            wrong = ""
            if ended.done():
                wrong = f"{ended.result()} before it answered{self._last_words()}; its log is {self._log}"
            elif asyncio.get_running_loop().time() > deadline:
                limit = f"{self._settings}.start_timeout"
                wrong = f"did not answer within {self._program.timeout:g} s: see its log {self._log}, or raise {limit}"
            if wrong:
                await self.end()
                raise EngineError(f"{self._name} {wrong}")
            await asyncio.wait([ended], timeout=POLL)

    async def wait_until_gone(self) -> str:
        assert self._ended is not None, "it was never started"
        return f"{self._name} {await asyncio.shield(self._ended)}; its log is {self._log}"

    async def end(self) -> None:
        if self._process is None:
            return
        process = self._process
        assert self._trees is not None
        await self._trees.end(process.pid)
        await asyncio.to_thread(process.wait)
        if self._process is process:  # only now: if this is cancelled on the way, `close` still knows of it
            self._process = None

    async def close(self) -> None:
        await self.end()
        if self._trees is not None:
            await self._trees.close()
            self._trees = None

    def _spawn(self, arguments: list[str]) -> asyncio.Future[str]:
        self._trees = self._trees or ProcessTrees(apart=self._apart)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        cookie = secrets.token_hex(16)
        env = {**child_environment(), **self._program.env, "STROP_SERVER": cookie}
        with open(self._log, "ab", opener=private) as log:
            log.write(f"$ {shlex.join(arguments)}\n".encode())
            log.flush()
            self._from = log.tell()
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={name: value for name, value in env.items() if value is not None},
                    start_new_session=True,
                )
            except OSError as error:
                python = f"{self._settings}.python"
                raise EngineError(
                    f"{self._name} cannot be started: {arguments[0]}: {error.strerror}. Fix: set {python} to a "
                    "Python that has it"
                ) from None
        self._trees.add(self._process.pid, cookie)
        self._ended = _end_of(self._process.pid)
        return self._ended

    def _last_words(self) -> str:
        """The last error it wrote since it was started, to be put after a sentence."""
        with self._log.open("rb") as log:
            log.seek(self._from)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if "Error" in line and "Failed core proc" not in line]
        return f": {said[-1].strip()[-500:]}" if said else ""


HERE = ServerLauncher()


def free_port(host: str = LOOPBACK) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


async def is_answering(url: str) -> bool:
    client = Client(url, connect_timeout=5.0)
    try:
        return (await client.request("GET", "/health", timeout=30.0)).status == 200
    except (ConnectionError, TimeoutError):
        return False
    finally:
        await client.close()


def _end_of(pid: int) -> asyncio.Future[str]:
    """How a child ended, once it has. It is looked at and not reaped: its number is still needed to end its tree."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    handle = os.pidfd_open(pid)

    def seen() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        if not ended.done():
            ended.set_result(_how(pid))

    loop.add_reader(handle, seen)
    return ended


def _how(pid: int) -> str:
    try:
        about = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return "was ended"
    if about is not None and about.si_code != os.CLD_EXITED:
        return f"was killed by {signal.Signals(about.si_status).name}"
    return f"ended with code {about.si_status if about else 'unknown'}"
