"""Versions that lie in checkpoints already: earlier ones of a policy, which an engine serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from strop.engines.receiver import WeightReceiver
from strop.learner.client import LearnerClient
from strop.models.checksums import verify
from strop.weights.base import Sent, Transfer
from strop.weights.files import send_adapter


class CheckpointTransfer(Transfer):
    """`find` says where a version lies. The embedded engine has the `process` that holds its weights take them from
    there; servers are sent the adapter in it. There is no probe: what a checkpoint holds is verified by its sums."""

    beside = True

    def __init__(self, policy: str, find: Callable[[str], Path], process: LearnerClient | None = None) -> None:
        self._policy, self._find, self._process = policy, find, process

    async def stage(self, version: str) -> None:
        if self._process is not None:
            await self._process.take(self._find(version))

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        await asyncio.to_thread(verify, self._find(version))
        return await send_adapter(self._find(version), f"{self._policy}-{version}", receiver)
