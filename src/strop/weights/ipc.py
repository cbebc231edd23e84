"""Weights to an engine on the same GPUs: handles of the learner's memory are passed on, and read over there.

Nothing is copied to the host, and nothing twice on the GPU but what the engine makes of it. Learner and engine must
have the same torch, since what a handle is made of is torch's own business.

vLLM 0.24 imports ray for this without asking for it; it comes with our extra `vllm`.

Left out: a learner of several ranks, whose handles would have to be gathered first.
"""

from __future__ import annotations

from strop.engines.receiver import LogprobProbe, WeightReceiver, WeightsRefused
from strop.learner.client import WeightClient
from strop.weights.base import Sent, Transfer


class IpcTransfer(Transfer):
    """Sends what the learner holds at the moment."""

    def __init__(self, learner: WeightClient) -> None:
        self._learner = learner
        self._sent: tuple[str, LogprobProbe] | None = None

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        probe, again = await self._learner.probe(), self._sent is not None and self._sent[0] == version
        refuse_moved_on(self._sent, version, probe)
        exported = await self._learner.export_handles()
        receiver.tensors.refuse_misfits(exported.specs, "the learner's weights")
        await receiver.begin_transfer(None)
        await receiver.start_update()
        await receiver.update(exported.specs, exported.handles)
        await receiver.finish_update()
        await self._learner.release_handles()
        if again:  # the learner may have trained on between the two
            refuse_moved_on(self._sent, version, await self._learner.probe())
        self._sent = version, probe
        return Sent(receiver.model, probe)


def refuse_moved_on(sent: tuple[str, LogprobProbe] | None, version: str, probe: LogprobProbe) -> None:
    """An engine that was started again wants the version it had, and the learner may have trained on since."""
    if sent is not None and sent[0] == version and sent[1] != probe:
        raise WeightsRefused(
            f"version {version} is not at hand any more, since the learner has trained on: the engine serves again "
            "from the next version on"
        )
