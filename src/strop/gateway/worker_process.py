"""One gateway worker, as its owner sees it: what it asks for, whether it answers, and how it is ended.

Wherever it is, all that is taken from it comes over one connection. Once a worker is replaced that connection is closed
here before anything else: a process that cannot be killed, since its machine is out of reach, has nobody to write to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from strop.errors import EngineError, Fenced
from strop.gateway.relay import RelayedRequest, TokenRequests
from strop.gateway.worker import WorkerSetup
from strop.net.link import Handler, LinkLost, ProcessLink
from strop.store.base import AttemptStore, Ref
from strop.store.encoded_turns import EncodedTurn
from strop.types import Event, Turn

if TYPE_CHECKING:
    from strop.gateway.keeper import WorkerKeeper

PING = 2.0
"""Seconds between two looks whether a worker answers."""
HUNG = 30.0
"""Seconds after which one that does not is replaced: no request keeps a worker busy for so long."""
START = 120.0
"""Seconds that a worker may take to start."""
LAST_WORDS = 5.0
"""Seconds in which one that closed its connection may say why, and end."""
ENDING = 15.0
"""Seconds that one which was told to stop may take."""
LOG = logging.getLogger("strop.gateway")


class EncodedStore(AttemptStore, Protocol):
    """A store that also takes turns which are rows already."""

    async def add_encoded(self, turns: Sequence[EncodedTurn]) -> None: ...


class StartedWorker(ABC):
    """A process that was started to be a worker. `calls` is the owner's end of the connection to it."""

    calls: socket.socket
    pid: int

    @abstractmethod
    async def wait(self, seconds: float) -> str:
        """How it ended; nothing where it has not within so many seconds."""

    @abstractmethod
    async def kill(self) -> None:
        """Returns once it is gone, as far as that can be known here."""

    def reaches(self, url: str) -> bool:
        """Whether a server at this address is the same one for it as it is here."""
        return True


def describe_end(code: int) -> str:
    """
    >>> describe_end(-9), describe_end(1)
    ('was killed by signal 9', 'ended with code 1')
    """
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


class WorkerProcess:
    """One worker: a process with its epoch, and what it has asked for."""

    def __init__(self, owner: WorkerKeeper, setup: WorkerSetup) -> None:
        self.setup = setup
        self._owner = owner
        self._tokens = TokenRequests(owner.engines)
        self._at_work: set[Ref] = set()  # attempts with calls in flight
        self._replaced = False
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()

    async def start(self, process: StartedWorker) -> None:
        """Returns once the process answers. Raises `EngineError` if it does not."""
        self.process = process
        self.link = self._tokens.link = await ProcessLink.open(process.calls, self._handlers(), lost=self.gone.set)
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.end("did not start")
            raise

    async def _wait_until_ready(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self.ready, self.gone)]
        await asyncio.wait(waits, timeout=START, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if not self.ready.is_set():
            log = f"; its log is {self.setup.log}" if self.setup.log else ""
            raise EngineError(f"gateway worker {self.setup.place} did not start{log}")

    def reaches(self, url: str) -> bool:
        return self.process.reaches(url)

    async def watch(self) -> str:
        """Returns once it is gone, or has to go: then why."""
        while not self.gone.is_set():
            try:
                async with asyncio.timeout(HUNG):
                    await self.link.call("counts", (), dict[str, int])
            except TimeoutError:
                return f"did not answer for {HUNG:g} s"
            except LinkLost:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), PING)
        return ""

    async def wait_until_idle(self, rollout: str, attempt: int, limit: float) -> None:
        with contextlib.suppress(LinkLost, TimeoutError):  # one that is gone has nothing in flight
            async with asyncio.timeout(limit + PING):
                await self.link.call("wait_until_idle", (rollout, attempt, limit), None)

    async def end(self, why: str) -> str:
        """Nothing is taken from it any more; what it had sent is written, its attempts are told, before their agents
        give up, and its process is gone. Returns how that ended, if it did by itself."""
        gone, self._replaced = self.gone.is_set(), True
        self._tokens.cancel_all()
        self.link.close()
        try:
            await self.link.wait_until_done()
            await self._owner.blame(self._at_work, why)
            how = await self.process.wait(LAST_WORDS) if gone else ""
        finally:  # given up in the middle, too
            await self.process.kill()
        return how or "closed its connection"

    async def stop(self) -> None:
        """Let it end its requests, for some seconds."""
        with contextlib.suppress(LinkLost):
            self.link.send("stop", ())
        if not await self.process.wait(ENDING):
            LOG.warning("gateway worker %d did not end when it was told to", self.setup.place)
        await self.end("was told to stop")

    # -- what it asks for ----------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Handler]:
        store = self._owner.store
        return {
            "get": Handler(tuple[str], store.get),
            "attempts": Handler(tuple[str], store.attempts),
            "attempt": Handler(tuple[str], store.attempt),
            "turns": Handler(tuple[str, int | None], self._turns),
            "add_turns": Handler(tuple[list[Turn]], self._add_turns),
            "add_encoded": Handler(tuple[list[EncodedTurn]], self._add_encoded),
            "add_events": Handler(tuple[list[Event]], self._add_events),
            "generate": Handler(tuple[RelayedRequest], self._begin),
            "cancel": Handler(tuple[int], self._tokens.cancel),
            "explain": Handler(tuple[str, int, str], self._tokens.explain),
            "began": Handler(Ref, lambda *attempt: self._at_work.add(cast(Ref, attempt))),
            "ended": Handler(Ref, lambda *attempt: self._at_work.discard(cast(Ref, attempt))),
            "unclaimed": Handler(tuple[str], self._owner.tell_of_unclaimed),
            "ready": Handler(tuple[int], self._is_ready),
        }

    def _is_ready(self, epoch: int) -> None:
        assert epoch == self.setup.epoch
        self.ready.set()

    def _refuse_replaced(self) -> None:
        if self._replaced:
            raise Fenced(f"epoch {self.setup.epoch} of gateway worker {self.setup.place} is over")

    def _turns(self, rollout: str, attempt: int | None) -> Awaitable[list[Turn]]:
        return self._owner.store.turns(rollout, attempt=attempt)

    def _add_turns(self, turns: list[Turn]) -> Awaitable[None]:
        self._refuse_replaced()
        return self._owner.store.add_turns(turns)

    def _add_encoded(self, turns: list[EncodedTurn]) -> Awaitable[None]:
        self._refuse_replaced()
        return self._owner.store.add_encoded(turns)

    def _add_events(self, events: list[Event]) -> Awaitable[None]:
        self._refuse_replaced()
        return self._owner.store.add_events(events)

    def _begin(self, request: RelayedRequest) -> None:
        self._refuse_replaced()
        self._tokens.begin(request)
