"""The embedded engine as the gateway sees it: requests go to the process that holds the weights, tokens come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from strop.config import EngineConfig
from strop.engines.base import Chunk, Engine, EngineSetup, GivenAnswer
from strop.engines.receiver import WeightSource
from strop.errors import StropError
from strop.types import Sampling

Arrival = Chunk | StropError


class Link(Protocol):
    """What this engine needs of the process that holds a policy's weights."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], to: asyncio.Queue[Arrival]
    ) -> int:
        """Begin a request; its chunks, or the error that ended it, are put on `to`. Returns its number."""
        ...

    def cancel(self, id: int) -> None: ...

    @property
    def context(self) -> int:
        """The most tokens a sequence may have; known once the model is loaded."""
        ...

    async def wait_until_idle(self) -> None:
        """Wait until no request is at work. How fast their tokens are read plays no part in it."""

    async def load(self, version: str) -> None: ...

    async def score_answers(self, answers: list[GivenAnswer]) -> list[list[float]]: ...


class Embedded(Engine):
    """Batched decoding beside the learner, on its very parameters."""

    shares_weights = True

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open = asyncio.Event()
        self._open.set()

    @classmethod
    def make(cls, setup: EngineSetup) -> Embedded:
        assert setup.link is not None, "the embedded engine lives where the weights are"
        return cls(setup.link)

    @classmethod
    def choose_transfer(cls, config: EngineConfig) -> Literal["shared"]:
        return "shared"

    @property
    def context(self) -> int:
        return self._link.context

    @property
    def holds_to_schemas(self) -> bool:
        return True

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        while not self._open.is_set():  # it may have been closed again before this request's turn came
            await self._open.wait()
        arrivals, done = asyncio.Queue[Arrival](), False
        id = self._link.generate(prompt_ids, sampling, stop_ids, arrivals)
        try:
            while not done:
                arrival = await arrivals.get()
                done = isinstance(arrival, StropError) or arrival.finish is not None
                if isinstance(arrival, StropError):
                    raise arrival
                yield arrival
        finally:
            if not done:
                self._link.cancel(id)

    @classmethod
    def refuse_scoring(cls, temperature: float) -> None:
        """Any will do."""

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        """Read in token trees, as the learner reads a batch: what answers begin with in common is computed once."""
        return await self._link.score_answers(list(answers))

    async def pause(self) -> None:
        self._open.clear()
        await self._link.wait_until_idle()

    async def resume(self) -> None:
        self._open.set()

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        """The weights are in place: only the version's name is passed on."""
        await self._link.load(version)

    async def close(self) -> None:
        """The process belongs to the learner and ends with it."""
