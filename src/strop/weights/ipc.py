"""Weights to an engine on the same GPUs: handles of the learner's memory are passed on, and read over there.

    prepare ──▶ learner: finite? handles ──▶ probe       while the step is committed; the server paused before that
    publish ──▶ server:  start ──▶ update ──▶ finish ──▶ go on ──▶ score the probe

Several servers on that GPU read the same handles, side by side. Nothing is copied to the host, and nothing twice on the
GPU but what each engine makes of it. Where the engine's own
tensors are known, the learner's lie in memory as those do, so that the engine copies each at once. Learner and engine
must have the same torch, since what a handle is made of is torch's own business.

vLLM 0.24 imports ray for this without asking for it; it comes with our extra `vllm`.

Left out: a model that is sharded over several ranks, which lies nowhere as a whole.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct

from strop.engines.receiver import LogprobProbe, WeightReceiver, WeightsRefused
from strop.errors import EngineError
from strop.learner.client import WeightClient
from strop.learner.verbs import IpcHandles
from strop.weights.base import Sent, Transfer


class Exported(Struct, frozen=True):
    """What the learner was asked for to send a version: handles, and then what a server must find."""

    version: str
    fused: dict[str, tuple[str, ...]] | None
    handles: asyncio.Future[IpcHandles]
    probe: asyncio.Future[LogprobProbe]


class IpcTransfer(Transfer):
    """Sends what the learner holds at the moment."""

    def __init__(self, learner: WeightClient) -> None:
        self._learner = learner
        self._sent: tuple[str, LogprobProbe] | None = None
        self._names: list[str] = []  # of the learner's tensors
        self._fuses = True  # until a server refuses what should be its own tensors
        self._fused: dict[str, tuple[str, ...]] | None = None  # as the last server took them
        self._prepared: Exported | None = None
        self._publishing: str | None = None  # the version that is on its way to all servers, so that nothing is trained
        self._newest: str | None = None  # that was on its way last

    async def stage(self, version: str) -> None:
        self._publishing = self._newest = version

    async def discard_others(self, version: str) -> None:
        self._publishing = self._prepared = None

    def prepare(self, version: str) -> None:
        if self._sent is not None:  # which of a server's tensors are known is known from then on
            self._prepared = self._export(version, self._fused)

    def _export(self, version: str, fused: dict[str, tuple[str, ...]] | None) -> Exported:
        handles = asyncio.ensure_future(self._learner.export_handles(fused))
        probe = asyncio.ensure_future(self._learner.probe())
        for future in (handles, probe):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # `send` raises it
        return Exported(version, fused, handles, probe)

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        refuse_older(self._newest, version)
        again = version != self._publishing and self._sent is not None and self._sent[0] == version
        if again:
            refuse_moved_on(self._sent, version, await self._learner.probe())
        self._names = self._names or list(await self._learner.specs())
        fused = receiver.fuse(self._names) if self._fuses else None
        exported = self._prepared
        if again or exported is None or (exported.version, exported.fused) != (version, fused):
            exported = self._export(version, fused)
            self._prepared = None if again else exported
        handles = await exported.handles
        receiver.tensors.refuse_misfits(handles.specs, "the learner's weights")
        await self._hand_over(handles, receiver)
        probe = await exported.probe
        if again:  # the learner may have trained on between the two
            refuse_moved_on(self._sent, version, await self._learner.probe())
        self._sent, self._fused = (version, probe), fused if self._fuses else None
        return Sent(receiver.model, probe)

    async def _hand_over(self, exported: IpcHandles, receiver: WeightReceiver) -> None:
        await receiver.begin_transfer(None)
        fused = exported.sent.keys() != exported.specs.keys()
        try:
            await _update(exported, receiver, fused=fused)
        except EngineError:
            if not fused:
                raise
            await _update(await self._learner.export_handles(None), receiver, fused=False)
            self._fuses = False  # its tensors are others than those that are known


async def _update(exported: IpcHandles, receiver: WeightReceiver, *, fused: bool) -> None:
    await receiver.start_update(fused=fused)
    await receiver.update(exported.sent, exported.handles)
    await receiver.finish_update()


def refuse_moved_on(sent: tuple[str, LogprobProbe] | None, version: str, probe: LogprobProbe) -> None:
    """An engine that was started again wants the version it had, and the learner may have trained on since."""
    if sent is not None and sent[0] == version and sent[1] != probe:
        raise _moved_on(version)


def refuse_older(newest: str | None, version: str) -> None:
    """The same where another version was published since: what the learner holds is that, or what follows it."""
    if newest not in (None, version):
        raise _moved_on(version)


def _moved_on(version: str) -> WeightsRefused:
    return WeightsRefused(
        f"version {version} is not at hand any more, since the learner has trained on: the engine serves again from "
        "the next version on"
    )
