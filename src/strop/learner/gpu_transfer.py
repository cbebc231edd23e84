"""The learner's end where weights go from GPU to GPU: handles of its memory, or a broadcast to an engine's workers.

Left out: a learner of several ranks, which would have to gather handles or tensors first.
"""

from __future__ import annotations

import pickle
import socket
import time
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from strop.engines.receiver import TensorSpec, WeightsRefused
from strop.errors import EngineError
from strop.imports import to_install
from strop.learner.verbs import IpcHandles

TRANSFER_TIMEOUT = 300.0
"""Seconds for the workers to come, and for all tensors to arrive."""


def export_handles(model: Any) -> IpcHandles:
    """Handles of a model's parameters. In the process that holds them; they live as long as the parameters do."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    device = next(iter(parameters.values())).device
    if device.type != "cuda":
        raise WeightsRefused(
            f"weights on {device.type} have no handles that another process can open. Fix: set engine.vllm.weights "
            "to files"
        )
    if name := next((name for name, tensor in parameters.items() if not tensor.is_contiguous()), None):
        raise WeightsRefused(f"{name} does not lie in one piece in memory. Fix: set engine.vllm.weights to files")
    torch.cuda.synchronize(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in parameters.values()]
    specs = {n: TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in parameters.items()}
    return IpcHandles(specs, pickle.dumps(handles))


class Broadcaster:
    """The learner's end, on its GPU."""

    def __init__(self, address: str, port: int, sock: socket.socket) -> None:
        self.address = address
        self.port = port
        self._sock: socket.socket | None = sock
        self._group: Any = None

    @staticmethod
    def listen() -> Broadcaster:
        """Take a port; workers on other machines reach it by this machine's name."""
        try:
            import vllm.distributed  # pyright: ignore # noqa: F401
        except ImportError as error:
            raise WeightsRefused(
                f"the learner cannot send weights by NCCL without vLLM beside it ({error}): {to_install('vllm')}, "
                "or set engine.vllm.weights to files"
            ) from None
        sock = socket.create_server(("", 0))
        return Broadcaster(socket.gethostbyname(socket.gethostname()), sock.getsockname()[1], sock)

    def meet(self, num_workers: int) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # pyright: ignore
        from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore

        assert self._sock is not None
        sock, self._sock = self._sock, None
        group = StatelessProcessGroup.create(
            self.address,
            self.port,
            rank=0,
            world_size=1 + num_workers,
            store_timeout=int(TRANSFER_TIMEOUT),
            listen_socket=sock,
        )
        self._group = PyNcclCommunicator(group, device=torch.cuda.current_device())

    def broadcast(self, model: Any) -> None:
        """Send every parameter, in order. The stream is an own one: if nobody takes them, only that one hangs."""
        assert self._group is not None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        sent: list[torch.Tensor] = []
        for _, parameter in model.named_parameters():
            sent.append(parameter.detach().contiguous())
            self._group.broadcast(sent[-1], src=0, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        while not done.query():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine's workers did not take the weights within {TRANSFER_TIMEOUT:g} s. Fix: see its log"
                )
            time.sleep(0.001)
