"""Weights to an engine on GPUs of its own: tensors are broadcast from the learner's GPU to the engine's workers.

    learner: rank 0, listens ──▶ workers: ranks 1.., told over HTTP where ──▶ one broadcast per tensor, in one order

The learner's process must have vLLM installed: both sides use its communicator. ModelTensors travel one by one.

Left out: a learner of several ranks, which would have to gather each tensor first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from strop.engines.delivery import Delivered, LogprobProbe, ModelTensors
from strop.learner.client import WeightClient
from strop.weights.ipc import about, refuse_moved_on

if TYPE_CHECKING:
    from strop.engines.vllm.protocol import Api


class Nccl:
    """Delivers what the learner holds at the moment. A server that was started again is met anew."""

    def __init__(self, learner: WeightClient) -> None:
        self._learner = learner
        self._sent: tuple[str, LogprobProbe] | None = None
        self._joined: tuple[Api, int] | None = None  # and the port at which they met

    async def deliver(self, api: Api, version: str, model: ModelTensors) -> Delivered:
        probe = await self._learner.probe()
        refuse_moved_on(self._sent, version, probe)
        specs = await self._learner.specs()
        model.refuse_misfits(specs, "the learner's weights")
        await self._learner.refuse_broken()
        if self._joined is None or self._joined[0] is not api:
            self._joined = await self._join(api)
        await api.start_update()
        await _both(api.update(about(specs)), self._learner.broadcast(self._joined[1]))
        await api.finish_update()
        self._sent = version, probe
        return Delivered(api.base, probe)

    async def _join(self, api: Api) -> tuple[Api, int]:
        num_workers = await api.num_workers()
        address, port = await self._learner.listen()
        place = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 1 + num_workers}
        await _both(api.begin_transfer(place), self._learner.meet(port, num_workers))
        return api, port


async def _both(theirs: Any, ours: Any) -> None:
    """Two sides that wait for each other. If one fails, the other is not waited for: it may never end."""
    tasks = [asyncio.ensure_future(theirs), asyncio.ensure_future(ours)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
