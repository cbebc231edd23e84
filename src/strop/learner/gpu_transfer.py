"""The learner's end where weights go from GPU to GPU: handles of its memory, or a broadcast to an engine's workers.

Left out: handles of a model that is sharded over several ranks, which lies nowhere as a whole.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from strop.engines.receiver import TensorSpec, WeightsRefused
from strop.errors import EngineError
from strop.imports import to_install
from strop.learner.verbs import IpcHandles

TRANSFER_TIMEOUT = 300.0
"""Seconds for the workers to come, and for all tensors to arrive."""
PIECE = 2**27
"""Bytes of a piece of memory that tensors are put together in. So much more is needed while they are."""
BUCKET = 2**30
"""Bytes, or a little more, of tensors that are on their way at once; until they have arrived they stay in memory."""
ALIGNED = 256
"""Each tensor in a piece begins at a multiple of this many numbers, as one alone would."""


class HandleExporter:
    """Handles of parameters. Made once: they are good as long as the parameters stay where they are in memory."""

    def __init__(self, fused: dict[str, tuple[str, ...]] | None) -> None:
        self.fused = fused
        self._made: tuple[list[int], IpcHandles] | None = None

    def export(self, parameters: Mapping[str, Tensor]) -> IpcHandles:
        """In the process that holds them. What was written to them before is seen by whoever opens the handles."""
        first = next(iter(parameters.values()))
        if first.device.type != "cuda":
            raise WeightsRefused(
                f"weights on {first.device.type} have no handles that another process can open. Fix: set "
                "engine.vllm.weights to files"
            )
        if name := next((name for name, tensor in parameters.items() if not tensor.is_contiguous()), None):
            raise WeightsRefused(f"{name} does not lie in one piece in memory. Fix: set engine.vllm.weights to files")
        if self._made is None or self._made[0] != _places(parameters):
            own = {name: parameter.detach() for name, parameter in parameters.items()}
            tensors = own if self.fused is None else join(parameters, self.fused)
            uuid = str(torch.cuda.get_device_properties(first.device).uuid)
            handles = [{uuid: _make_handle(tensor)} for tensor in tensors.values()]
            made = IpcHandles(_describe(own), _describe(tensors), pickle.dumps(handles))
            self._made = _places(parameters), made
        torch.cuda.synchronize(first.device)
        return self._made[1]


def _make_handle(tensor: Tensor) -> tuple[Any, ...]:
    """What torch opens a tensor of another process with. It need not wait for what was under way here when the handle
    was made: it is told of one only when nothing is, and would open an event for each tensor each time."""
    about = list(reduce_tensor(tensor)[1])
    about[list(signature(rebuild_cuda_tensor).parameters).index("event_sync_required")] = False
    return tuple(about)


@torch.no_grad()
def join(parameters: Mapping[str, Tensor], fused: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """The tensors that `fused` names, in its order, whose parts are the parameters: these are moved to lie in them,
    with their values, some tensors to a piece of memory. Another process opens a handle for each piece."""
    joined: dict[str, Tensor] = {}
    for names in _split(parameters, fused):
        sizes = [_pad(sum(parameters[part].numel() for part in fused[name])) for name in names]
        first = parameters[fused[names[0]][0]]
        memory = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        for name, piece in zip(names, memory.split(sizes), strict=True):
            at = 0
            for part in fused[name]:
                parameter, start = parameters[part], at
                at += parameter.numel()
                parameter.data = piece[start:at].copy_(parameter.view(-1)).view(parameter.shape)
            joined[name] = piece[:at].view(-1, *parameters[fused[name][0]].shape[1:])
    return joined


def _split(parameters: Mapping[str, Tensor], fused: dict[str, tuple[str, ...]]) -> Iterator[list[str]]:
    """Names of tensors of one type that are to lie in one piece of memory, of `PIECE` bytes or a little more."""
    names: list[str] = []
    size = 0
    for name, parts in fused.items():
        first = parameters[parts[0]]
        if names and (size >= PIECE or first.dtype != parameters[fused[names[0]][0]].dtype):
            yield names
            names, size = [], 0
        names.append(name)
        size += sum(parameters[part].nbytes for part in parts)
    yield names


def _pad(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _places(parameters: Mapping[str, Tensor]) -> list[int]:
    return [parameter.data_ptr() for parameter in parameters.values()]


def _describe(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {n: TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}


def split_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Some tensors at a time, each in one piece and on a GPU if there is one. The next ones are asked for, and may be
    made, only then."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor.contiguous())
        if sum(each.nbytes for each in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class Broadcaster:
    """The learner's end, on its GPU."""

    def __init__(self, address: str, port: int, sock: socket.socket) -> None:
        self.address = address
        self.port = port
        self._sock: socket.socket | None = sock
        self._group: Any = None

    @staticmethod
    def listen(address: str) -> Broadcaster:
        """Take a port at the address by which workers reach this machine; without one, by its name."""
        try:
            import vllm.distributed  # pyright: ignore # noqa: F401
        except ImportError as error:
            raise WeightsRefused(
                f"the learner cannot send weights by NCCL without vLLM beside it ({error}): {to_install('vllm')}, "
                "or set engine.vllm.weights to files"
            ) from None
        sock = socket.create_server((address, 0))
        return Broadcaster(address or socket.gethostbyname(socket.gethostname()), sock.getsockname()[1], sock)

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

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors, in order. The stream is an own one: if nobody takes them, only that one hangs."""
        assert self._group is not None
        stream = torch.cuda.Stream()
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        for bucket in split_buckets(tensors):
            stream.wait_stream(torch.cuda.current_stream())
            for tensor in bucket:
                self._group.broadcast(tensor, src=0, stream=stream)
            self._wait(stream, deadline)

    def _wait(self, stream: torch.cuda.Stream, deadline: float) -> None:
        done = torch.cuda.Event()
        done.record(stream)
        while not done.query():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine's workers did not take the weights within {TRANSFER_TIMEOUT:g} s. Fix: see its log"
                )
            time.sleep(0.001)
