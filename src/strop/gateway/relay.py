"""Tokens for a gateway worker, of engines that its owner has.

worker                                   owner
RelayedEngine ──RelayedRequest──▶ TokenRequests ──▶ Engine
              ◀────Arrival, ...──
              ──────────────────▶ the engine's servers, while the owner lends lines to them (homes.py says which
                                  server a rollout asks)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import cast

from msgspec import Struct

from strop.engines.base import Chunk, Engine
from strop.engines.receiver import WeightSource
from strop.engines.server_events import BrokenOff
from strop.engines.vllm.line import VllmLine
from strop.errors import EngineError, StropError
from strop.gateway.homes import Homes
from strop.net.link import LinkLost, ProcessLink, make_error
from strop.types import Mode, Rollout, Sampling, Task

LOG = logging.getLogger("strop.gateway")


class RelayedRequest(Struct, frozen=True, array_like=True):
    """A request for tokens, with what engines choose by: the rollout as far as they look at it."""

    id: int
    policy: str
    rollout: str
    group: str
    task: str
    mode: str
    prompt_ids: list[int]
    sampling: Sampling
    stop_ids: list[int]


class Arrival(Struct, frozen=True, array_like=True):
    """What came of a request: a chunk, or the error that ended it."""

    id: int
    chunk: Chunk | None = None
    error: str = ""
    message: str = ""


class ReplicaLine:
    """The line to one replica of a policy's engine, as a home of rollouts."""

    def __init__(self, replica: int) -> None:
        self.replica, self.line, self.rollouts = replica, VllmLine(), 0

    @property
    def in_flight(self) -> int:
        return self.line.in_flight

    def can_answer(self, now: float) -> bool:
        return self.line.leads_somewhere


class PolicyLines:
    """The lines to all replicas of a policy's engine."""

    def __init__(self) -> None:
        self._lines: list[ReplicaLine] = []
        self._homes = Homes(self._lines)

    def of_replica(self, replica: int) -> VllmLine:
        for number in range(len(self._lines), replica + 1):
            self._lines.append(ReplicaLine(number))
        return self._lines[replica].line

    def find(self, rollout: Rollout | None) -> ReplicaLine | None:
        """The one that a rollout is to use; None if there is none."""
        return self._homes.find("" if rollout is None else rollout.id, time.monotonic())


class Relay:
    """Requests for tokens on their way to the owner's engines, and what comes back."""

    def __init__(self) -> None:
        self.link: ProcessLink | None = None
        self.contexts: dict[str, int] = {}
        self.held: frozenset[str] = frozenset()
        self._lines: defaultdict[str, PolicyLines] = defaultdict(PolicyLines)
        self._streams: dict[int, asyncio.Queue[Chunk | StropError]] = {}
        self._num = 0

    def begin(self, rollout: Rollout, policy: str, ids: Sequence[int], sampling: Sampling, stop: Sequence[int]) -> int:
        assert self.link is not None
        self._num += 1
        self._streams[self._num] = asyncio.Queue()
        of = rollout
        request = RelayedRequest(
            self._num, policy, of.id, of.group, of.task.id, of.mode, list(ids), sampling, list(stop)
        )
        self.link.send("generate", (request,))
        return self._num

    async def next(self, id: int) -> Chunk:
        arrival = await self._streams[id].get()
        if isinstance(arrival, StropError):
            raise arrival
        return arrival

    def end(self, id: int, *, cancel: bool) -> None:
        del self._streams[id]
        if cancel and self.link is not None:
            with suppress(LinkLost):
                self.link.send("cancel", (id,))

    def lines_of(self, policy: str) -> PolicyLines:
        return self._lines[policy]

    async def explain(self, policy: str, replica: int, error: Exception) -> EngineError:
        """What the engine says of an answer that its server broke off."""
        assert self.link is not None
        try:
            return EngineError(await self.link.call("explain", (policy, replica, str(error)), str))
        except LinkLost:
            return EngineError(str(error))

    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            if (stream := self._streams.get(arrival.id)) is not None:
                stream.put_nowait(arrival.chunk or make_error(arrival.error, arrival.message))


class RelayedEngine(Engine):
    """A policy's engine in another process. What is paused, loaded and closed is so there."""

    def __init__(self, relay: Relay, policy: str, rollout: Rollout | None = None) -> None:
        self._relay, self._policy, self._rollout = relay, policy, rollout

    @property
    def context(self) -> int:
        return self._relay.contexts.get(self._policy, 0)

    @property
    def holds_to_schemas(self) -> bool:
        return self._policy in self._relay.held

    def of_rollout(self, rollout: Rollout) -> Engine:
        return RelayedEngine(self._relay, self._policy, rollout)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        found, given = self._relay.lines_of(self._policy).find(self._rollout), False
        if found is not None and await found.line.wait_until_open():
            try:
                async with aclosing(found.line.generate(prompt_ids, sampling, stop_ids)) as chunks:
                    async for chunk in chunks:
                        given = True
                        yield chunk
                return
            except (ConnectionError, TimeoutError, BrokenOff) as error:
                if given:
                    raise await self._relay.explain(self._policy, found.replica, error) from None
        async with aclosing(self._ask_owner(prompt_ids, sampling, stop_ids)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _ask_owner(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
    ) -> AsyncGenerator[Chunk]:
        rollout = self._rollout or Rollout(id="", group="", member=0, task=Task(id=""), created=0.0)
        id, done = self._relay.begin(rollout, self._policy, prompt_ids, sampling, stop_ids), False
        try:
            while not done:
                try:
                    chunk = await self._relay.next(id)
                except StropError:
                    done = True
                    raise
                done = chunk.finish is not None
                yield chunk
        finally:
            self._relay.end(id, cancel=not done)

    async def pause(self) -> None:
        raise AssertionError("engines are paused where they are")

    async def resume(self) -> None:
        raise AssertionError("engines go on where they are")

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        raise AssertionError("versions are loaded where the engine is")

    async def close(self) -> None:
        """It is closed where it is."""


class TokenRequests:
    """The owner's side: what one worker has asked for. `link` leads to the worker."""

    link: ProcessLink

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._arrivals: list[Arrival] = []

    def begin(self, request: RelayedRequest) -> None:
        self._streams[request.id] = task = asyncio.create_task(self._generate(request))
        task.add_done_callback(lambda _: self._streams.pop(request.id, None))

    def cancel(self, id: int) -> None:
        if (task := self._streams.get(id)) is not None:
            task.cancel()

    def cancel_all(self) -> None:
        for task in list(self._streams.values()):
            task.cancel()

    def explain(self, policy: str, replica: int, error: str) -> Awaitable[str]:
        return self._engines[policy].explain(error, replica)

    async def _generate(self, asked: RelayedRequest) -> None:
        rollout = Rollout(
            id=asked.rollout,
            group=asked.group,
            member=0,
            task=Task(id=asked.task),
            mode=cast(Mode, asked.mode),
            created=0.0,
        )
        try:
            engine, finish = self._engines[asked.policy].of_rollout(rollout), None
            stream = engine.generate(asked.prompt_ids, asked.sampling, stop_ids=asked.stop_ids)
            async with aclosing(cast("AsyncGenerator[Chunk]", stream)) as chunks:
                async for chunk in chunks:
                    finish = chunk.finish
                    self._send(Arrival(asked.id, chunk))
            if finish is None:
                raise EngineError("the engine's answer ended without a reason")
        except StropError as error:
            self._send(Arrival(asked.id, None, type(error).__name__, str(error)))
        except Exception as error:
            LOG.error("an engine failed", exc_info=error)
            self._send(Arrival(asked.id, None, EngineError.__name__, "the engine ran into an error of its own"))

    def _send(self, arrival: Arrival) -> None:
        """What comes up in one turn of the event loop goes out together."""
        if not self._arrivals:
            asyncio.get_running_loop().call_soon(self._flush)
        self._arrivals.append(arrival)

    def _flush(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        with suppress(LinkLost):
            self.link.send("chunks", (arrivals,))
