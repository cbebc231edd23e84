"""Weights to an engine on GPUs of its own: tensors are broadcast from the learner's GPU to the engine's workers.

    learner: rank 0, listens ──▶ workers: ranks 1.., told over HTTP where ──▶ one broadcast per tensor, in one order

The learner's process must have vLLM installed: both sides use its communicator. Tensors travel one by one. Where they
are sharded over several ranks, these put one after the other together, and the first sends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from weakref import WeakKeyDictionary

from strop.engines.receiver import LogprobProbe, MeetingPlace, WeightReceiver
from strop.learner.client import WeightClient
from strop.weights.base import Sent, Transfer
from strop.weights.ipc import refuse_moved_on, refuse_older


class NcclTransfer(Transfer):
    """Sends what the learner holds at the moment. A server that was started again is met anew."""

    def __init__(self, learner: WeightClient) -> None:
        self._learner = learner
        self._sent: tuple[str, LogprobProbe] | None = None
        self._newest: str | None = None  # that was published, or is about to be
        self._met = WeakKeyDictionary[WeightReceiver, int]()  # and the port at which each was met

    async def stage(self, version: str) -> None:
        self._newest = version

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        refuse_older(self._newest, version)
        probe, again = await self._learner.probe(), self._sent is not None and self._sent[0] == version
        refuse_moved_on(self._sent, version, probe)
        specs = await self._learner.specs()
        receiver.tensors.refuse_misfits(specs, "the learner's weights")
        await self._learner.refuse_broken()
        if receiver not in self._met:
            self._met[receiver] = await self._meet(receiver)
        await receiver.start_update()
        await _both(receiver.update(specs), self._learner.broadcast(self._met[receiver]))
        await receiver.finish_update()
        if again:  # the learner may have trained on between the two
            refuse_moved_on(self._sent, version, await self._learner.probe())
        self._sent = version, probe
        return Sent(receiver.model, probe)

    async def _meet(self, receiver: WeightReceiver) -> int:
        num_workers = await receiver.num_workers()
        address, port = await self._learner.listen()
        place = MeetingPlace(address, port, num_workers)
        await _both(receiver.begin_transfer(place), self._learner.meet(port, num_workers))
        return port


async def _both(theirs: Awaitable[None], ours: Awaitable[None]) -> None:
    """Two sides that wait for each other. If one fails, the other is not waited for: it may never end."""
    tasks = [asyncio.ensure_future(theirs), asyncio.ensure_future(ours)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
