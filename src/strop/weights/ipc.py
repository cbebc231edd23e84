"""Weights to an engine on the same GPUs: handles of the learner's memory are passed on, and read over there.

Nothing is copied to the host, and nothing twice on the GPU but what the engine makes of it. Learner and engine must
have the same torch, since what a handle is made of is torch's own business.

vLLM 0.24 imports ray for this without asking for it; it comes with our extra `vllm`.

Left out: a learner of several ranks, whose handles would have to be gathered first.
"""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from strop.engines.delivery import Delivered, Probe, Refused, Spec, Tensors
from strop.weights.base import Holder

if TYPE_CHECKING:
    from strop.engines.vllm.protocol import Api


class Export(Struct, frozen=True):
    """The tensors of a model, in an order of their own. `handles` is a pickled list of {GPU: how to open it}."""

    specs: dict[str, Spec]
    handles: bytes


def export(model: Any) -> Export:
    """Handles of a model's parameters. In the process that holds them; they live as long as the parameters do."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    device = next(iter(parameters.values())).device
    if device.type != "cuda":
        raise Refused(
            f"weights on {device.type} have no handles that another process can open: set engine.vllm.weights to files"
        )
    if name := next((name for name, tensor in parameters.items() if not tensor.is_contiguous()), None):
        raise Refused(f"{name} does not lie in one piece in memory: set engine.vllm.weights to files")
    torch.cuda.synchronize(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in parameters.values()]
    specs = {n: Spec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in parameters.items()}
    return Export(specs, pickle.dumps(handles))


class Ipc:
    """Delivers what `holder` holds at the moment."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._sent: tuple[str, Probe] | None = None

    async def deliver(self, api: Api, version: str, model: Tensors) -> Delivered:
        probe: Probe = await self._holder.call("probe")
        refuse_moved_on(self._sent, version, probe)
        export: Export = await self._holder.call("export")
        model.refuse_misfits(export.specs, "the learner's weights")
        await api.begin_transfer({})
        await api.start_update()
        await api.update(about(export.specs) | {"ipc_handles_pickled": base64.b64encode(export.handles).decode()})
        await api.finish_update()
        await self._holder.call("release")
        self._sent = version, probe
        return Delivered(api.base, probe)


def about(specs: dict[str, Spec]) -> dict[str, Any]:
    """A weight update in vLLM's words."""
    return {
        "names": list(specs),
        "dtype_names": [spec.dtype for spec in specs.values()],
        "shapes": [list(spec.shape) for spec in specs.values()],
    }


def refuse_moved_on(sent: tuple[str, Probe] | None, version: str, probe: Probe) -> None:
    """An engine that was started again wants the version it had, and the learner may have trained on since."""
    if sent is not None and sent[0] == version and sent[1] != probe:
        raise Refused(
            f"version {version} is not at hand any more, since the learner has trained on: the engine serves again "
            "from the next version on"
        )
