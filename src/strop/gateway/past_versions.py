"""Earlier versions of a policy as opponents: each of them is an engine, and a rollout is answered by one.

pool      1.0  1.4  1.8         the model itself, and what is in two slots
chance    .18  .27  .55         by recency
rollout   g000012.3 ──▶ 1.8     as for all members of its group; in evaluations always the model itself
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from msgspec import Struct

from strop.engines.base import Chunk, Engine, GivenAnswer
from strop.engines.receiver import WeightSource
from strop.gateway.draw import draw_number
from strop.types import Rollout, Sampling


class PoolMember(Struct, frozen=True):
    """A version that may answer, and how likely it does; not yet normalised."""

    version: str
    engine: Engine
    weight: float


class PastVersions(Engine):
    """`own` is the policy's own model, and each of `slots` has room for one of the pool's versions."""

    def __init__(self, policy: str, own: Engine, slots: Sequence[Engine]) -> None:
        self.policy, self.own, self.slots = policy, own, slots
        self.members: list[PoolMember] = []

    def of_rollout(self, rollout: Rollout) -> Engine:
        return self._choose(rollout).of_rollout(rollout)

    def _choose(self, rollout: Rollout) -> Engine:
        """Who answers in a rollout."""
        if rollout.mode != "train" or not self.members:
            return self.own
        left = draw_number(rollout, self.policy, "past") * sum(member.weight for member in self.members)
        for member in self.members:
            if left < member.weight:
                return member.engine
            left -= member.weight
        return self.members[-1].engine

    # -- an engine like any other ------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        return self.own.context

    @property
    def holds_to_schemas(self) -> bool:
        return self.own.holds_to_schemas

    @property
    def serving(self) -> bool:
        return self.own.serving

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in (self.own, *self.slots)))

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        return self.own.generate(prompt_ids, sampling, stop_ids=stop_ids)

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        return await self.own.score(answers)

    async def pause(self) -> None:
        await asyncio.gather(*(engine.pause() for engine in (self.own, *self.slots)))

    async def resume(self) -> None:
        await asyncio.gather(*(engine.resume() for engine in (self.own, *self.slots)))

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        raise AssertionError("a pool's versions are loaded one by one, each into its slot")

    async def close(self) -> None:
        """They are closed by what made them."""
