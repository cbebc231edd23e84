"""The learner's verbs as coroutines, for those who are not in its process. Types are those of verbs.py, checked here:
a verb that changes there and not here is a type error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from strop.engines.base import GivenAnswer
from strop.engines.receiver import LogprobProbe, TensorSpec
from strop.learner.verbs import IpcHandles, LearnerVerbs, WeightVerbs
from strop.trajectory import Batch, Entries

P = ParamSpec("P")
R = TypeVar("R")


class WeightClient(ABC):
    """`WeightVerbs` from elsewhere."""

    @abstractmethod
    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        """Have the verb of that name done, and return its result or raise its error."""

    async def _call(self, verb: Callable[Concatenate[Any, P], R], *args: P.args, **_: P.kwargs) -> R:
        return await self._send_call(verb.__name__, args)

    async def specs(self) -> dict[str, TensorSpec]:
        return await self._call(WeightVerbs.specs)

    async def probe(self) -> LogprobProbe:
        return await self._call(WeightVerbs.probe)

    async def write(self, folder: Path) -> None:
        await self._call(WeightVerbs.write, folder)

    async def write_adapter(self, folder: Path) -> None:
        await self._call(WeightVerbs.write_adapter, folder)

    async def refuse_broken(self) -> None:
        await self._call(WeightVerbs.refuse_broken)

    async def export_handles(self, fused: dict[str, tuple[str, ...]] | None) -> IpcHandles:
        return await self._call(WeightVerbs.export_handles, fused)

    async def listen(self) -> tuple[str, int]:
        return await self._call(WeightVerbs.listen)

    async def meet(self, port: int, num_workers: int) -> None:
        await self._call(WeightVerbs.meet, port, num_workers)

    async def broadcast(self, port: int) -> None:
        await self._call(WeightVerbs.broadcast, port)


class LearnerClient(WeightClient):
    """`LearnerVerbs` from elsewhere."""

    async def load(self, version: str) -> None:
        await self._call(LearnerVerbs.load, version)

    async def find_masks(self, batch: Batch) -> list[int]:
        return await self._call(LearnerVerbs.find_masks, batch)

    async def score(self, batch: Batch) -> tuple[Entries, dict[str, float]]:
        return await self._call(LearnerVerbs.score, batch)

    async def score_answers(self, answers: list[GivenAnswer]) -> list[list[float]]:
        return await self._call(LearnerVerbs.score_answers, answers)

    async def update(self, batch: Batch) -> dict[str, float]:
        return await self._call(LearnerVerbs.update, batch)

    async def begin_save(self, folder: Path, meta: dict[str, Any]) -> None:
        await self._call(LearnerVerbs.begin_save, folder, meta)

    async def finish_save(self) -> None:
        await self._call(LearnerVerbs.finish_save)

    async def restore(self, folder: Path) -> dict[str, Any]:
        return await self._call(LearnerVerbs.restore, folder)

    async def take(self, folder: Path) -> None:
        await self._call(LearnerVerbs.take, folder)

    async def digest(self) -> str:
        return await self._call(LearnerVerbs.digest)
