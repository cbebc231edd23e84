"""The process that holds the weights, seen from the run: the learner, and beside it the embedded engine on the same
parameters.

    LearnerProcess (in the run)  ──generate, cancel, verbs──▶  LearnerChild (child.py)
      .of("main")                ◀──chunks, results, errors──

The child is a fresh Python that imports nothing of the user's script and dies with its parent; a launcher starts it,
here or on another machine. It holds one policy, or
several that are LoRA adapters on one model: `of` gives the handle of each. A run may have several children, and several
that train one model together (rank_processes.py). One that hangs is killed (heartbeat.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.config import MAIN
from strop.engines.embedded.engine import Arrival
from strop.errors import LearnerDied, LearnerError, StropError
from strop.learner.client import LearnerClient
from strop.learner.heartbeat import STARTING, hang_up, limit_silence
from strop.learner.launcher import StartedChild, start_here
from strop.learner.outgoing import Outgoing
from strop.learner.verbs import LearnerSettings, ProcessVerbs
from strop.types import Sampling


class LearnerProcess:
    """A handle on the child. `context`, the most tokens a sequence may have, is known once it has started. `hung` says
    that it was killed since it hung, and how that was noticed. `ended`: its connection has; `died` soon says why."""

    context = 0
    ended = False

    def __init__(
        self, log: Path, child: StartedChild | None = None, *, name: str = "the process that holds the weights"
    ) -> None:
        """Speak to a child, which is started here where none is given. What it prints goes to `log`."""
        self.name, self.hung = name, ""
        self._silence, self._operation = STARTING, STARTING
        self._process, self._connection, self._place = child or start_here([log])[0]
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, tuple[PolicyClient, asyncio.Queue[Arrival]]] = {}
        self._clients: dict[str, PolicyClient] = {}
        self.died: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._end = ""
        self._outgoing = Outgoing(self._connection)
        limit_silence(self._connection.fileno(), self._silence)
        self._reader = threading.Thread(target=self._read, name="learner-reader", daemon=True)
        self._reader.start()

    async def start(self, *settings: LearnerSettings) -> None:
        """Returns once the model of these policies is loaded. Of several ranks all are started at once."""
        self._operation = max(one.learner.collective_timeout for one in settings)
        self._silence = max(one.learner.hang_timeout for one in settings)
        limit_silence(self._connection.fileno(), self._silence)
        call = LearnerProcess.call(self, None, ProcessVerbs.start.__name__, (list(settings), self._place))
        self.context = await call

    async def compile_ahead(self) -> bool:
        """See `ProcessVerbs.compile_ahead`. Once every model on this machine is loaded: it takes a GPU's memory, and
        engines that measure what is free must not be mistaken."""
        return await self.call(None, ProcessVerbs.compile_ahead.__name__, ())

    def of(self, policy: str = MAIN) -> PolicyClient:
        """The handle of one of the policies that it was, or will be, started with."""
        return self._clients.setdefault(policy, PolicyClient(self, policy))

    def links(self, policy: str) -> list[PolicyClient]:
        """Of every process that serves the policy, where the embedded engine does."""
        return [self.of(policy)]

    async def call(self, policy: str | None, verb: str, args: tuple[Any, ...]) -> Any:
        """Have a verb done for a policy, or by the process as a whole, and return its result or raise its error."""
        return await self.send_call(policy, verb, pickle.dumps(args))

    async def send_call(self, policy: str | None, verb: str, pickled: bytes) -> Any:
        """The same with arguments that are pickled already."""
        id = next(self._ids)
        future = self._calls[id] = self._loop.create_future()
        self._send(("call", id, policy, verb), pickled)
        return await future

    def generate(
        self,
        client: PolicyClient,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
        to: asyncio.Queue[Arrival],
    ) -> int:
        """Begin a request of a policy; its chunks, or the error that ended it, are put on `to`. Returns its number."""
        id = next(self._ids)
        self._streams[id] = client, to
        client.begin(id)
        self._send(("generate", id, client.policy, list(prompt_ids), sampling, list(stop_ids)))
        return id

    def cancel(self, id: int) -> None:
        if id in self._streams and not self._closing:
            self._forget(id)
            with contextlib.suppress(LearnerError):
                self._send(("cancel", id))

    def _forget(self, id: int) -> None:
        client, _ = self._streams.pop(id)
        client.end(id)

    async def watch(self) -> None:
        """Wait until the child dies, and raise that. Its death ends the run: requests in flight are left waiting rather
        than failed, so that no agent is blamed for it, and their attempts are taken up again on resume."""
        await asyncio.shield(self.died)

    async def close(self) -> None:
        self._closing = True
        self._outgoing.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            await asyncio.to_thread(self._process.kill)
            await asyncio.to_thread(self._process.wait)
        for one in (self._reader, self._outgoing):
            await asyncio.to_thread(one.join)
        self._connection.close()

    def _send(self, message: tuple[Any, ...], *more: bytes) -> None:
        """`more` follows as it is."""
        if self.died.done():
            raise self._dead()
        self._outgoing.send(pickle.dumps(message), *more)

    def _dead(self) -> LearnerDied:
        return LearnerDied(f"{self._end}; its log is {self._log}. Fix: resume the run to go on")

    def _read(self) -> None:
        while not self.hung:
            try:
                message = self._connection.recv()
            except BlockingIOError:
                self._kill(f"has not answered for {self._silence:g} s (learner.hang_timeout)")
            except (EOFError, OSError):
                break
            else:
                if message[0] != "beat":
                    self._loop.call_soon_threadsafe(self._arrive, message)
                elif message[1] > self._operation:
                    limit = f"{self._operation:g} s (learner.collective_timeout)"
                    self._kill(f"has been in one operation for {limit}: {message[2]}")
        self.ended = True
        self._end = self.hung or f"{self.name} {self._find_end()}"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._fail_all)

    def _find_end(self) -> str:
        """How it ended, in words; of one on another machine that takes seconds to find out."""
        if not self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # its connection closes a moment before it is gone
        code = self._process.poll()
        return "is gone" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def _kill(self, why: str) -> None:
        """It hangs. The loop may be about to send it something."""
        self.hung = f"{self.name} {why} and was killed"
        self._process.kill()
        hang_up(self._connection.fileno())

    def _arrive(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("chunks", chunks):
                for id, chunk in chunks:
                    if stream := self._streams.get(id):
                        stream[1].put_nowait(chunk)
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
        for future in (*self._calls.values(), self.died):
            if not future.done():
                future.set_exception(self._dead())
        self.died.exception()  # nobody need be watching
        self._calls.clear()


class PolicyClient(LearnerClient):
    """One policy of a process: its coroutines are the learner's verbs, and it is the embedded engine's link."""

    def __init__(self, process: LearnerProcess, policy: str) -> None:
        self.process, self.policy = process, policy
        self._at_work: set[int] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def context(self) -> int:
        return self.process.context

    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        return await self.process.call(self.policy, verb, args)

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], to: asyncio.Queue[Arrival]
    ) -> int:
        return self.process.generate(self, prompt_ids, sampling, stop_ids, to)

    def cancel(self, id: int) -> None:
        self.process.cancel(id)

    def begin(self, id: int) -> None:
        self._at_work.add(id)
        self._idle.clear()

    def end(self, id: int) -> None:
        self._at_work.discard(id)
        if not self._at_work:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def watch(self) -> None:
        """See `LearnerProcess.watch`."""
        await self.process.watch()
