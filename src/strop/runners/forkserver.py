"""The process that workers are forked from: it has imported what they all need, so a new worker costs milliseconds and
shares that memory.

    processes ──"f" and a socket──▶ fork server ──fork──▶ worker (owns the socket)
              ──"p" and a file with a `Preload`: import this as well, for workers that come after it──▶
              ◀──"forked PID" / "ended PID CODE" / "failed WHY": it cannot import what it must──

Several workers are asked for at once (`MAX_ASKED`), and answered in the order of asking.

It ends when its connection to the runner closes, also because that was killed, and takes all workers, whatever their
agents started and their folder with it: it is a child subreaper, so nothing can get out from below it.
`multiprocessing`'s forkserver is the same idea, but imports the program's main script into every worker, which runs it
again where it is not guarded, and lives until the program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from strop.errors import AgentError
from strop.files import private
from strop.imports import with_fix
from strop.net.process_group import become_subreaper, kill_descendants, kill_leftovers
from strop.runners.worker_messages import Preload

Serve = Callable[[socket.socket], None]
BEGIN = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # the runner decides when to end
try:
    from strop.runners import forkserver
    serve = forkserver.prepare()
except Exception as error:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    os.write(int(sys.argv[1]), f"failed {said}\\n".encode(errors="replace"))
    raise
forkserver.main(serve, *sys.argv[1:])
"""
"""What it runs: anything may be missing, strop's own packages too, and must be told."""


TOKEN = "STROP_WORKERS"
"""The variable by which what agents started is found where a fork server was killed, and is not above it any more."""
MAX_ASKED = 16
"""Workers that are asked for and not forked yet: each question has a socket on its way, and the system bounds those."""
STARTS, KILLS = 3, 12
"""How often the process is started for one worker before that counts as its fault; where it was killed each time, which
others do to it."""


class ForkedWorker(NamedTuple):
    """A forked worker. `end` becomes its exit code, or minus the signal that killed it, or None if nobody knows."""

    pid: int
    end: asyncio.Future[int | None]


class ForkServer:
    """Our side: fork workers, hear of their ends. The process starts with the first fork, anew if it died. `python` is
    another environment's, where it is not our own."""

    def __init__(self, log: Path, folder: str, environment: dict[str, str], python: str = "") -> None:
        self._python = python
        self._folder = folder
        self._log = log
        self._token = secrets.token_hex(16)
        self._environment = environment | {TOKEN: self._token}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = self._was_killed = False
        self._launching = asyncio.Lock()
        self._asking = asyncio.Semaphore(MAX_ASKED)
        self._asked: deque[asyncio.Future[ForkedWorker]] = deque()
        self._preload: Preload | None = None
        self._why = ""

    async def preload(self, preload: Preload) -> None:
        """Have workers that are forked from now on find this imported. Where it cannot be imported, they find out."""
        self._preload = preload
        async with self._launching:
            if self._process is not None and self._process.poll() is None:
                self._send_preload()

    def _send_preload(self) -> None:
        if self._preload is None:
            return
        with tempfile.TemporaryFile() as file:  # a message of any length would have to be waited for
            file.write(msgspec.json.encode(self._preload))
            file.flush()
            with contextlib.suppress(OSError):  # it is gone, and will be sent it when it is started again
                socket.send_fds(self._control, [b"p"], [file.fileno()])

    async def fork(self) -> tuple[ForkedWorker, socket.socket]:
        """A new worker, and the socket to talk to it. A server that dies without a word, as one that is killed while it
        starts, is started again; one that says why it cannot, or dies each time, is an `AgentError`."""
        died = killed = 0
        while died < STARTS and killed < KILLS:
            try:
                return await self._try_fork()
            except OSError:
                if self._why or self._closed or self._process is None:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close a moment before it is over
                    await asyncio.to_thread(self._process.wait, 10)
                by_signal = (self._process.returncode or 0) < 0
                died, killed = died + (not by_signal), killed + by_signal
        why = with_fix(self._why, self._python or sys.executable) if self._why else f"look into {self._log}"
        raise AgentError(f"the process that starts agents died: {why}")

    async def _try_fork(self) -> tuple[ForkedWorker, socket.socket]:
        ours, theirs = socket.socketpair()
        # The caller may be cancelled. The answer to the question comes all the same, and must not be taken for the
        # answer to the next one; a worker whose socket is closed ends by itself.
        asking = asyncio.create_task(self._ask(theirs))
        try:
            return await asyncio.shield(asking), ours
        except BaseException:
            ours.close()
            raise

    async def _ask(self, theirs: socket.socket) -> ForkedWorker:
        with theirs:
            async with self._asking:
                async with self._launching:
                    if self._closed:
                        raise ConnectionResetError
                    if self._process is None or self._process.poll() is not None:
                        await self._launch()
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                    forked: asyncio.Future[ForkedWorker] = asyncio.get_running_loop().create_future()
                    self._asked.append(forked)
                return await forked

    async def close(self) -> None:
        """End every worker and the process itself."""
        self._closed = True
        if self._process is None:
            return
        self._writer.close()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        _fail(self._asked)
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._was_killed or self._process.returncode:
            await asyncio.to_thread(kill_leftovers, self._token)
        self._process = None

    async def _launch(self) -> None:
        if self._process is not None:
            self._was_killed = True
            self._writer.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            process = self._popen(theirs.fileno())
        reader, self._writer = await asyncio.open_connection(sock=self._control)
        self._asked = deque()
        self._listening = asyncio.create_task(self._listen(reader, self._asked))
        self._process = process
        self._send_preload()

    def _popen(self, control: int) -> subprocess.Popen[bytes]:
        path = f"sys.path[:0] = {source_path()!r}" if self._python else f"sys.path[:] = {sys.path!r}"
        code = f"import os, sys\n{path}\n{BEGIN}"
        with open(self._log, "ab", opener=private) as log:
            return subprocess.Popen(
                [self._python or sys.executable, "-c", code, str(control), self._folder],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[control],
                env=self._environment,
            )

    async def _listen(self, reader: asyncio.StreamReader, asked: deque[asyncio.Future[ForkedWorker]]) -> None:
        ends: dict[int, asyncio.Future[int | None]] = {}  # of those that live
        with contextlib.suppress(ConnectionError):  # it died with a question of ours unread
            while line := await reader.readline():
                what, rest = line.split(None, 1)
                if what == b"failed":
                    self._why = rest.decode(errors="replace").strip()
                elif what == b"forked":
                    ends[int(rest)] = end = asyncio.get_running_loop().create_future()
                    asked.popleft().set_result(ForkedWorker(int(rest), end))
                else:
                    pid, code = map(int, rest.split())
                    ends.pop(pid).set_result(code)
        for end in ends.values():
            end.set_result(None)
        _fail(asked)


def _fail(asked: deque[asyncio.Future[ForkedWorker]]) -> None:
    """There will be no answer."""
    while asked:
        if not (forked := asked.popleft()).done():
            forked.set_exception(ConnectionResetError())


def source_path() -> list[str]:
    """Where strop's source is, for a Python that has its own copy of strop installed, or none but what strop needs.
    What is installed for us is not for others."""
    root = Path(__file__).parents[2]
    return [] if root.name in ("site-packages", "dist-packages") else [str(root)]


def prepare() -> Serve:
    """Import what all workers need. Returns what a worker does."""
    from strop.agent import llm
    from strop.runners import worker

    llm.preload()
    return worker.serve


def main(serve: Serve, control_fd: str, folder: str) -> None:
    """The fork server's own life. `folder` goes when it goes."""
    gc.collect()
    gc.freeze()  # what is shared stays shared: the collector no longer writes to it
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    become_subreaper()
    workers: set[int] = set()

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid not in workers:  # what an agent started, and lost its parents
                    continue
                workers.discard(pid)
                _kill_group(pid)  # what the agent started must not outlive its worker
                with contextlib.suppress(OSError):
                    control.sendall(b"ended %d %d\n" % (pid, os.waitstatus_to_exitcode(status)))

    # News of an end wakes `select` up: a handler alone may run only after the next message, if it comes just before it.
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake_up)
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            reap()
        if control not in ready:
            continue
        try:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionError:
            message, fds = b"", []
        if not message:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for pid in workers:
                _kill_group(pid)
            kill_descendants()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        (fd,) = fds
        if message == b"p":
            _import_ahead(fd)
            continue
        os.set_inheritable(fd, False)  # an agent's subprocesses must not hold it open
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.close(wake)
            os.close(waker)
            control.close()
            _become_worker(fd, serve)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # both sides do it, so that it is done by the one that comes first
        workers.add(pid)
        os.close(fd)
        with contextlib.suppress(OSError):
            control.sendall(b"forked %d\n" % pid)


def _import_ahead(fd: int) -> None:
    """What cannot be imported here is left to the workers, which say why."""
    from strop.runners import worker

    with open(fd, "rb") as file:
        file.seek(0)
        given = msgspec.json.decode(file.read(), type=Preload)
    try:
        worker.load(given)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()


def _wake_up(*_: object) -> None:
    """A signal that is handled writes to the wake-up descriptor; there is nothing else to do."""


def _become_worker(fd: int, serve: Serve) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        serve(socket.socket(fileno=fd))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
