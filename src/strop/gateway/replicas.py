"""One policy, several engines: a rollout stays with the one that knows its prefix, and moves on when that one cannot.

    replicas = Replicas([first, second])
    engine = replicas.of(rollout.id)     an engine like any other, for the requests of one rollout

A rollout goes to the same replica again, until that has too much to do (homes.py). A replica that fails
(`EngineError`) is left out for a while and asked again later, one whose server is being started again until that is up,
and one that did not get a new version until it gets one, for which the others do not wait. What was in flight on it is
begun anew elsewhere, if not a token of it was given out; otherwise it fails with the reason: an answer of two engines'
tokens would be neither's.

While replicas are paused, requests wait here, up to `patience` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import cast

from strop.engines.base import Chunk, Engine, GivenAnswer
from strop.engines.direct_line import DirectLine, LineHolder
from strop.engines.receiver import WeightSource
from strop.errors import ContextOverflow, EngineError
from strop.gateway.homes import LOOKS, Homes
from strop.types import Rollout, Sampling

REST = 5.0
"""Seconds a replica that failed is left out for."""


class ReplicaHolder(LineHolder):
    """Who asks a replica's server beside it has its line only while the replica has the newest version."""

    def __init__(self, holder: LineHolder) -> None:
        self._holder = holder
        self._line: DirectLine | None = None
        self._is_withheld = False

    def tell(self, line: DirectLine | None) -> None:
        self._line = line
        if not self._is_withheld:
            self._holder.tell(line)

    def withhold(self, is_withheld: bool) -> None:
        if is_withheld != self._is_withheld:
            self._is_withheld = is_withheld
            self._holder.tell(None if is_withheld else self._line)

    def of_replica(self, number: int) -> LineHolder:
        return self._holder.of_replica(number)

    async def wait_until_idle(self) -> None:
        await self._holder.wait_until_idle()


class Replica:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.in_flight = 0
        self.rollouts = 0  # that have their place here
        self.failed: float | None = None  # when it did last
        self.loading = asyncio.Lock()
        self.lines: list[ReplicaHolder] = []
        self._is_outdated = False

    @property
    def outdated(self) -> bool:
        return self._is_outdated

    @outdated.setter
    def outdated(self, is_outdated: bool) -> None:
        self._is_outdated = is_outdated
        for line in self.lines:
            line.withhold(is_outdated)

    def can_answer(self, now: float) -> bool:
        rested = self.failed is None or now - self.failed > REST
        return not self.outdated and self.engine.serving and rested


class Replicas(Engine):
    """Several engines that serve the same policy, as one. `in_turn`: they are started one after the other, since each
    measures how much memory is left on a GPU that they share."""

    def __init__(self, engines: Sequence[Engine], *, patience: float = 600.0, in_turn: bool = False) -> None:
        assert engines, "a policy needs an engine"
        self._in_turn = in_turn
        self._replicas = [Replica(engine) for engine in engines]
        for replica in self._replicas:
            replica.engine.give_way(partial(self._can_others_answer, replica))
        self._patience = patience
        self._homes = Homes(self._replicas)
        self._context, self._contexts_left = 0, 0  # the smallest there is, and for how many more looks
        self._open = asyncio.Event()
        self._open.set()
        self._loads = 0
        self._late: set[asyncio.Task[None]] = set()

    def of_rollout(self, rollout: Rollout) -> Engine:
        return self.of(rollout.id)

    def of(self, rollout: str) -> Engine:
        """These replicas for the requests of one rollout."""
        return Sticky(self, rollout)

    def pick(self, rollout: str, but: Sequence[Replica] = ()) -> Replica:
        """Who answers a rollout's next request. Raises `EngineError` if nobody is left."""
        found = self._homes.find(rollout, time.monotonic(), but)
        if found is None:  # if all have failed of late, the one that did longest ago is the best bet
            left = [replica for replica in self._replicas if replica not in but and not replica.outdated]
            if not left:
                raise EngineError("none of the policy's engines can answer. Fix: see their logs")
            found = min(left, key=lambda replica: replica.failed or 0.0)
            self._homes.settle(rollout, found)
        return found

    def _can_others_answer(self, replica: Replica) -> bool:
        now = time.monotonic()
        return any(one is not replica and one.can_answer(now) for one in self._replicas)

    async def answer(
        self, rollout: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        await self._resumed()
        tried: list[Replica] = []
        while True:
            replica, given = self.pick(rollout, tried), False
            replica.in_flight += 1
            try:
                stream = replica.engine.generate(prompt_ids, sampling, stop_ids=stop_ids)
                async with aclosing(cast(AsyncGenerator[Chunk, None], stream)) as chunks:
                    async for chunk in chunks:
                        given = True
                        yield chunk
                replica.failed = None
                return
            except ContextOverflow:
                raise
            except EngineError:
                replica.failed = time.monotonic()
                tried.append(replica)
                if given or len(tried) == len(self._replicas):
                    raise
            finally:
                replica.in_flight -= 1

    async def _resumed(self) -> None:
        """Wait while paused."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._open.is_set():  # it may be closed again before this request's turn comes
                    await self._open.wait()
        except TimeoutError:
            raise EngineError(
                f"the model has been paused for more than {self._patience:g} s. Fix: try again later, or raise "
                "gateway.pause_timeout"
            ) from None

    # -- an engine like any other ------------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        return any(replica.engine.serving and not replica.outdated for replica in self._replicas)

    @property
    def context(self) -> int:
        self._contexts_left -= 1
        if self._contexts_left < 0:
            self._contexts_left = len(self._replicas) // LOOKS
            self._context = min(replica.engine.context for replica in self._replicas)
        return self._context

    @property
    def holds_to_schemas(self) -> bool:
        return all(replica.engine.holds_to_schemas for replica in self._replicas)

    async def start(self) -> None:
        """All of them: one that does not come up is a mistake to be told, not a replica less."""
        if not self._in_turn:
            await asyncio.gather(*(replica.engine.start() for replica in self._replicas))
            return
        for replica in self._replicas:
            await replica.engine.start()

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        return self.answer("", prompt_ids, sampling, stop_ids)

    def lend(self, holder: LineHolder) -> None:
        for number, replica in enumerate(self._replicas):
            line = ReplicaHolder(holder.of_replica(number))
            line.withhold(replica.outdated)
            replica.lines.append(line)
            replica.engine.lend(line)

    async def explain(self, error: str, replica: int = 0) -> str:
        return await self._replicas[replica].engine.explain(error)

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        """By one of them, or another where that fails; also while they are paused."""
        tried: list[Replica] = []
        while True:
            replica = self.pick("", tried)
            try:
                return await replica.engine.score(answers)
            except EngineError:
                replica.failed = time.monotonic()
                tried.append(replica)
                if len(tried) == len(self._replicas):
                    raise

    async def pause(self) -> None:
        self._open.clear()
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())
        self._open.set()

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        """Returns once those have it that are up; it is an error if none gets it. The others take it when they are."""
        self._loads += 1
        up = [replica.engine.serving for replica in self._replicas]
        loads = [asyncio.create_task(self._load(one, self._loads, version, weights)) for one in self._replicas]
        try:
            first = {task for task, serving in zip(loads, up, strict=True) if serving} or set(loads)
            await asyncio.wait(first)
            if all(task.exception() for task in first):
                await asyncio.wait(loads)
        except asyncio.CancelledError:
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
            raise
        for replica, task in zip(self._replicas, loads, strict=True):
            replica.outdated = not task.done() or task.exception() is not None
        for task in loads:
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._end_late)
        self._refuse_failures([task.exception() if task.done() else None for task in loads])

    async def _load(self, replica: Replica, number: int, version: str, weights: WeightSource | None) -> None:
        async with replica.loading:
            if number == self._loads:  # or else the next one waits already
                await replica.engine.load(version, weights)
                replica.outdated = number != self._loads

    def _end_late(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # the replica stays as it is until the next version

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._each(lambda engine: engine.close())

    async def _each(self, verb: Callable[[Engine], Awaitable[None]]) -> None:
        """Have every engine do it. Those that cannot are left out for now; it is an error if none can."""
        done = await asyncio.gather(*(verb(replica.engine) for replica in self._replicas), return_exceptions=True)
        self._refuse_failures(done)

    def _refuse_failures(self, done: Sequence[BaseException | None]) -> None:
        """Raises what every engine failed with, or what no engine should."""
        failed = 0
        for replica, error in zip(self._replicas, done, strict=True):
            if isinstance(error, EngineError):
                replica.failed = time.monotonic()
                failed += 1
            if error is not None and (failed == len(self._replicas) or not isinstance(error, EngineError)):
                raise error


class Sticky(Engine):
    """Replicas as one rollout sees them."""

    def __init__(self, replicas: Replicas, rollout: str) -> None:
        self._replicas, self._rollout = replicas, rollout

    @property
    def context(self) -> int:
        return self._replicas.context

    @property
    def holds_to_schemas(self) -> bool:
        return self._replicas.holds_to_schemas

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        return self._replicas.answer(self._rollout, prompt_ids, sampling, stop_ids)

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        return await self._replicas.score(answers)

    async def pause(self) -> None:
        await self._replicas.pause()

    async def resume(self) -> None:
        await self._replicas.resume()

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        await self._replicas.load(version, weights)

    async def close(self) -> None:
        """It is one rollout's view; the replicas are closed by who made them."""
