"""Only a version's name is passed on: learner and engine hold the same tensors, or the engine gets them by itself (from
GPU to GPU, see ipc.py and nccl.py)."""

from __future__ import annotations

from strop.engines.base import Engine
from strop.weights.base import Weights


class Shared(Weights):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def publish(self, version: str) -> None:
        await self._engine.load(version)
