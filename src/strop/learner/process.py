"""The process that holds the weights: the learner, and beside it the embedded engine on the same parameters.

    LearnerProcess (in the run)  ──generate, cancel, call──▶  child: one thread, one loop
                                 ◀──chunks, results, errors──   while busy: engine step, then look for messages

The child is a fresh Python that imports nothing of the user's script and dies with its parent. A call such as `update`
runs between decode steps, never beside one, unless rollouts may lag behind (loop.staleness): then the engine has a copy
of the weights, renewed between two decode steps, and the learner works in a thread beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.engines.embedded.engine import Arrival
from strop.engines.embedded.outbox import Outbox
from strop.errors import LearnerError, StropError
from strop.files import private
from strop.imports import one_line
from strop.net.secrets import child_environment
from strop.trajectory import Batch, Entries
from strop.types import Sampling

if TYPE_CHECKING:  # heavy: only the child imports them
    from strop.engines.embedded.core import Core
    from strop.learner.learner import Learner
    from strop.weights.copied import Copy
    from strop.weights.held import Held


KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that every glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Has glibc keep up to a GiB of freed memory: giving it back after every operation, only to have it filled with zeros
again for the next one, took a quarter of the time of a decode step."""

WAIT_SHORTLY = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""Has idle threads look for work for some tenths of a millisecond, then sleep. A decode step is a thousand short
operations: waking sleepers for each took half as long again as the step, and threads that never sleep take the cores
from everybody else."""


LEARNING = frozenset({"score", "update", "save", "restore", "digest"})
"""The verbs that take the learner's time, and need nothing of the engine."""


class LearnerProcess:
    """The run's handle on the child. Its coroutines are the learner's verbs; it is also the embedded engine's link."""

    def __init__(self, log: Path) -> None:
        """Start the child; it begins to import at once. What it prints goes to `log`."""
        self.context = 0
        self._process, self._connection = _spawn(log)
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[Arrival]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        threading.Thread(target=self._read, name="learner-reader", daemon=True).start()

    async def start(self, config: Config, folder: Path, *, serve: bool = True, train: bool = True) -> None:
        """Have the child load the model in `folder`, `serve` it there, `train` it there; returns once it can. A model
        that is only served has no learner: its weights stay as they are."""
        self.context = await self.call("start", config, folder, serve, train)

    async def call(self, verb: str, *args: Any) -> Any:
        """Run one of the learner's verbs in the child and wait for its result."""
        id = next(self._ids)
        future = self._calls[id] = self._loop.create_future()
        self._send(("call", id, verb, args))
        return await future

    def generate(
        self,
        id: int,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
        to: asyncio.Queue[Arrival],
    ) -> None:
        self._streams[id] = to
        self._idle.clear()
        self._send(("generate", id, list(prompt_ids), sampling, list(stop_ids)))

    def cancel(self, id: int) -> None:
        if id in self._streams and not self._closing:
            self._forget(id)
            with contextlib.suppress(LearnerError):
                self._send(("cancel", id))

    def _forget(self, id: int) -> None:
        del self._streams[id]
        if not self._streams:
            self._idle.set()

    async def drained(self) -> None:
        await self._idle.wait()

    async def load(self, version: str) -> None:
        await self.call("load", version)

    async def watch(self) -> None:
        """Wait until the child dies, and raise that. Its death ends the run: requests in flight are left waiting rather
        than failed, so that no agent is blamed for it, and their attempts are taken up again on resume."""
        await asyncio.shield(self._died)

    async def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._dead() from None

    def _dead(self) -> LearnerError:
        code = self._process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return LearnerError(
            f"the process that holds the weights {how}; its log is {self._log}; resume the run to go on"
        )

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(self._fail_all)
                return
            self._loop.call_soon_threadsafe(self._arrive, message)

    def _arrive(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("chunks", chunks):
                for id, chunk in chunks:
                    if queue := self._streams.get(id):
                        queue.put_nowait(chunk)
                        if isinstance(chunk, StropError) or chunk.finish:
                            self._forget(id)
            case ("result", id, value):
                if not (future := self._calls.pop(id)).done():
                    future.set_result(value)
            case ("error", id, error):
                if not (future := self._calls.pop(id)).done():
                    future.set_exception(error)
            case _:
                raise AssertionError(f"unknown message from the learner process: {message[0]}")

    def _fail_all(self) -> None:
        if not self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # its connection closes a moment before it is gone
        for future in (*self._calls.values(), self._died):
            if not future.done():
                future.set_exception(self._dead())
        self._died.exception()  # nobody need be watching
        self._calls.clear()


def _spawn(log: Path) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with open(log, "ab", opener=private) as out, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from strop.learner.process import serve; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={"TOKENIZERS_PARALLELISM": "false", **WAIT_SHORTLY, **KEEP_MEMORY, **child_environment()},
            start_new_session=True,  # Ctrl-C in the terminal is the run's to handle
        )
    return process, Connection(ours.detach())


# -- the child ---------------------------------------------------------------------------------------------------------


class Child:
    held: Held

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.core: Core | None = None  # none where another engine serves
        self.outbox = Outbox()
        self.copy: Copy | None = None
        self.aside: ThreadPoolExecutor | None = None
        self._learner: Learner | None = None  # none where nothing is trained
        self.started = False
        self._sending = threading.Lock()

    @property
    def busy(self) -> bool:
        return self.core is not None and self.core.busy

    def run(self) -> None:
        self.handle(self.connection.recv())
        while self.started:
            # Waiting costs nothing when idle; when busy, only what has already arrived is looked at.
            while self.connection.poll(0 if self.busy else None):
                self.handle(self.connection.recv())
            if self.core is not None and self.core.busy:
                with self.copy.stream() if self.copy else contextlib.nullcontext():
                    chunks = self.core.step()
                if due := self.outbox.take(chunks):
                    self.send("chunks", due)

    def send(self, *message: Any) -> None:
        with self._sending:
            self.connection.send(message)

    def handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("generate", id, prompt_ids, sampling, stop_ids):
                assert self.core is not None
                try:
                    self.core.add(id, prompt_ids, sampling, stop_ids)
                except StropError as error:
                    self.send("chunks", [(id, error)])
            case ("cancel", id):
                assert self.core is not None
                self.core.cancel(id)
                self.outbox.forget(id)
            case ("call", id, verb, args):
                if self.aside is not None and verb in LEARNING:
                    self.aside.submit(self.call, id, verb, args)
                else:
                    self.call(id, verb, args)
            case _:
                raise AssertionError(f"unknown message: {message[0]}")

    def call(self, id: int, verb: str, args: tuple[Any, ...]) -> None:
        try:
            holder = self if hasattr(self, verb) else self.held
            self.send("result", id, getattr(holder, verb)(*args))
        except StropError as error:
            self.send("error", id, error)
        except Exception as error:
            with contextlib.suppress(OSError):  # the log may be on a disk that is full
                traceback.print_exc()
            self.send("error", id, LearnerError(f"the learner could not {verb}: {one_line(error)}"))

    # The verbs of `call`.

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise LearnerError("the model is only served here, not trained: start a run with `strop train`")
        return self._learner

    def start(self, config: Config, folder: Path, serve: bool, train: bool) -> int:
        """Load the model, have it `serve` requests here if wanted, and return the longest context."""
        import torch

        from strop.algorithms import make
        from strop.engines.embedded.core import Core
        from strop.learner.learner import Learner
        from strop.learner.model import frozen
        from strop.weights.copied import Copy
        from strop.weights.held import Held

        torch.set_num_threads(config.engine.threads or os.cpu_count() or 1)
        torch.use_deterministic_algorithms(config.engine.deterministic)
        if train:
            algorithm = make(config.algorithm, config.learner, config.policy)
            steps = max(config.loop.steps, 1)
            self._learner = Learner(folder, config.learner, algorithm, seed=config.seed, steps=steps)
            model, plain = self._learner.model, self._learner.plain
        else:
            model = plain = frozen(folder, config.learner)
        longest = int(model.config.max_position_embeddings)
        context = min(config.policy.context or longest, longest)
        self.held = Held(plain, folder)
        if serve:
            if config.loop.staleness and train:
                self.copy, self.aside = Copy(model), ThreadPoolExecutor(1, "learner")
            self.core = Core(self.copy.model if self.copy else model, config.engine, context=context)
            context = self.core.context
        self.started = True
        return context

    def load(self, version: str) -> None:
        assert self.core is not None
        if self.copy is not None:
            self.copy.refresh()
        self.core.load(version)

    def score(self, batch: Batch) -> tuple[Entries, dict[str, float]]:
        seconds = self.learner.score(batch)
        return batch.entries, seconds

    def update(self, batch: Batch) -> dict[str, float]:
        return self.learner.update(batch)

    def save(self, folder: Path, meta: dict[str, Any]) -> None:
        self.learner.save(folder, meta)

    def restore(self, folder: Path) -> dict[str, Any]:
        return self.learner.restore(folder)

    def digest(self) -> str:
        return self.learner.digest()


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends; elsewhere the closed connection does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def serve(fd: int) -> None:
    """The child's life: until its parent goes."""
    die_with_parent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        Child(Connection(fd)).run()
