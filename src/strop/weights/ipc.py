"""Weights to an engine on the same GPUs: handles of the learner's memory are passed on, and read over there.

Nothing is copied to the host, and nothing twice on the GPU but what the engine makes of it. Learner and engine must
have the same torch, since what a handle is made of is torch's own business.

vLLM 0.24 imports ray for this without asking for it; it comes with our extra `vllm`.

Left out: a learner of several ranks, whose handles would have to be gathered first.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from strop.engines.delivery import Delivered, LogprobProbe, ModelTensors, TensorSpec, WeightsRefused
from strop.learner.client import WeightClient

if TYPE_CHECKING:
    from strop.engines.vllm.protocol import Api


class Ipc:
    """Delivers what the learner holds at the moment."""

    def __init__(self, learner: WeightClient) -> None:
        self._learner = learner
        self._sent: tuple[str, LogprobProbe] | None = None

    async def deliver(self, api: Api, version: str, model: ModelTensors) -> Delivered:
        probe = await self._learner.probe()
        refuse_moved_on(self._sent, version, probe)
        exported = await self._learner.export_handles()
        model.refuse_misfits(exported.specs, "the learner's weights")
        await api.begin_transfer({})
        await api.start_update()
        await api.update(about(exported.specs) | {"ipc_handles_pickled": base64.b64encode(exported.handles).decode()})
        await api.finish_update()
        await self._learner.release_handles()
        self._sent = version, probe
        return Delivered(api.base, probe)


def about(specs: dict[str, TensorSpec]) -> dict[str, Any]:
    """A weight update in vLLM's words."""
    return {
        "names": list(specs),
        "dtype_names": [spec.dtype for spec in specs.values()],
        "shapes": [list(spec.shape) for spec in specs.values()],
    }


def refuse_moved_on(sent: tuple[str, LogprobProbe] | None, version: str, probe: LogprobProbe) -> None:
    """An engine that was started again wants the version it had, and the learner may have trained on since."""
    if sent is not None and sent[0] == version and sent[1] != probe:
        raise WeightsRefused(
            f"version {version} is not at hand any more, since the learner has trained on: the engine serves again "
            "from the next version on"
        )
