"""Weights to an engine on GPUs of its own: tensors are broadcast from the learner's GPU to the engine's workers.

    learner: rank 0, listens ──▶ workers: ranks 1.., told over HTTP where ──▶ one broadcast per tensor, in one order

The learner's process must have vLLM installed: both sides use its communicator. Tensors travel one by one.

Left out: a learner of several ranks, which would have to gather each tensor first.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

from strop.engines.delivery import Delivered, Probe, Refused, Spec, Tensors
from strop.errors import EngineError
from strop.imports import to_install
from strop.weights.base import Holder
from strop.weights.ipc import about, refuse_moved_on

if TYPE_CHECKING:
    from strop.engines.vllm.protocol import Api

PATIENCE = 300.0
"""Seconds for the workers to come, and for all tensors to arrive."""


class Nccl:
    """Delivers what `holder` holds at the moment. A server that was started again is met anew."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._sent: tuple[str, Probe] | None = None
        self._joined: tuple[Api, int] | None = None  # and the port at which they met

    async def deliver(self, api: Api, version: str, model: Tensors) -> Delivered:
        probe: Probe = await self._holder.call("probe")
        refuse_moved_on(self._sent, version, probe)
        specs: dict[str, Spec] = await self._holder.call("specs")
        model.refuse_misfits(specs, "the learner's weights")
        await self._holder.call("refuse_broken")
        if self._joined is None or self._joined[0] is not api:
            self._joined = await self._join(api)
        await api.start_update()
        await _both(api.update(about(specs)), self._holder.call("broadcast", self._joined[1]))
        await api.finish_update()
        self._sent = version, probe
        return Delivered(api.base, probe)

    async def _join(self, api: Api) -> tuple[Api, int]:
        num_workers = await api.num_workers()
        address, port = await self._holder.call("listen")
        place = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 1 + num_workers}
        await _both(api.begin_transfer(place), self._holder.call("meet", port, num_workers))
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


class Sender:
    """The learner's end, on its GPU."""

    def __init__(self, address: str, port: int, sock: socket.socket) -> None:
        self.address = address
        self.port = port
        self._sock: socket.socket | None = sock
        self._group: Any = None

    @staticmethod
    def listening() -> Sender:
        """Take a port; workers on other machines reach it by this machine's name."""
        try:
            import vllm.distributed  # pyright: ignore # noqa: F401
        except ImportError as error:
            raise Refused(
                f"the learner cannot send weights by NCCL without vLLM beside it ({error}): {to_install('vllm')}, "
                "or set engine.vllm.weights to files"
            ) from None
        sock = socket.create_server(("", 0))
        return Sender(socket.gethostbyname(socket.gethostname()), sock.getsockname()[1], sock)

    def meet(self, num_workers: int) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # pyright: ignore
        from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore

        assert self._sock is not None
        sock, self._sock = self._sock, None
        group = StatelessProcessGroup.create(
            self.address,
            self.port,
            rank=0,
            world_size=1 + num_workers,
            store_timeout=int(PATIENCE),
            listen_socket=sock,
        )
        self._group = PyNcclCommunicator(group, device=torch.cuda.current_device())

    def broadcast(self, model: Any) -> None:
        """Send every parameter, in order. The stream is an own one: if nobody takes them, only that one hangs."""
        import torch

        assert self._group is not None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        sent: list[torch.Tensor] = []
        for _, parameter in model.named_parameters():
            sent.append(parameter.detach().contiguous())
            self._group.broadcast(sent[-1], src=0, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + PATIENCE
        while not done.query():
            if time.monotonic() > deadline:
                raise EngineError(f"the engine's workers did not take the weights within {PATIENCE:g} s: see its log")
            time.sleep(0.001)
