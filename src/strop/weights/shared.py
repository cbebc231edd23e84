"""Learner and engine hold the same tensors: there is nothing to send."""

from __future__ import annotations

from strop.engines.receiver import WeightReceiver, WeightsRefused
from strop.weights.base import Sent, Transfer


class SharedMemory(Transfer):
    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        raise WeightsRefused(
            f"{receiver.name} has weights of its own, and version {version} is only in the learner's memory. Fix: have "
            "weights sent as files"
        )
