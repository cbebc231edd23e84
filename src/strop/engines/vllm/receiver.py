"""The end of a vLLM server that takes new weights: from a folder, from GPU to GPU, or as an adapter."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from strop.engines.receiver import MeetingPlace, ModelTensors, TensorSpec, WeightReceiver, WeightsRefused
from strop.engines.vllm.fused import fuse
from strop.engines.vllm.protocol import VllmApi

LIMITS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.03}
"""Mean difference of a probe's logprobs that two implementations may have, by the type the server computes in. The ids
of a probe make no sense, and what a model expects after them is rounded far worse than what it expects in a text: in
bfloat16 the logits of SmolLM2-135M are off by 0.25 in the mean from what they would be in float32."""
HINT = " (vLLM on CPUs cannot load a model anew whose output layer is its embedding: use the embedded engine there)"


class VllmReceiver(WeightReceiver):
    def __init__(self, api: VllmApi, tensors: ModelTensors, dtype: str, *, fusable: bool = False) -> None:
        """`fusable`: which tensors the server has of its own is known (fused.py)."""
        super().__init__("vLLM", api.base, tensors, limit=LIMITS.get(dtype, LIMITS["bfloat16"]), hint=HINT)
        self._api = api
        self._fusable = fusable and api.takes_fused
        self._takes_own = False  # an update by its own tensors was started, and goes on from version to version
        self._ready = False  # for handles of memory, which need be announced but once

    @property
    def asleep(self) -> bool:
        return self._api.asleep or self._api.paused

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        """A server that pauses or sleeps has dropped its caches, and computes nothing until it answers again."""
        if self._api.asleep:
            await self._api.wake("weights")
        else:
            await self._api.pause()
        try:
            yield
        except WeightsRefused:
            await self._answer_again()
            raise
        await self._answer_again()

    async def _answer_again(self) -> None:
        if self._api.asleep:
            await self._api.wake("kv_cache")
        else:
            await self._api.resume()

    async def score(self, ids: Sequence[int], *, model: str) -> list[float]:
        return await self._api.score(ids, model=model)

    async def load_folder(self, folder: Path, version: str) -> None:
        await self._api.reload(str(folder))

    async def load_adapter(self, name: str, folder: Path) -> str:
        # It refuses a name that it has, and takes keys that it cached for another adapter of that name for this one's.
        fresh = f"{name}-{secrets.token_hex(4)}"
        self.adapters.add(fresh)
        await self._api.load_adapter(fresh, str(folder))
        return fresh

    async def unload_adapter(self, name: str) -> None:
        self.adapters.discard(name)
        await self._api.unload_adapter(name)

    async def num_workers(self) -> int:
        return await self._api.num_workers()

    async def begin_transfer(self, place: MeetingPlace | None) -> None:
        about: dict[str, Any] = {}
        if place is not None:
            about = {"master_address": place.address, "master_port": place.port}
            about |= {"rank_offset": 1, "world_size": 1 + place.num_workers}
        if place is not None or not self._ready:
            await self._api.begin_transfer(about)
        self._ready = place is None

    def fuse(self, names: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
        return fuse(names) if self._fusable else None

    async def start_update(self, *, fused: bool = False) -> None:
        if fused and self._takes_own:
            return
        await self._api.start_update(fused=fused)
        self._takes_own = fused

    async def update(self, specs: Mapping[str, TensorSpec], handles: bytes | None = None) -> None:
        about: dict[str, Any] = {
            "names": list(specs),
            "dtype_names": [spec.dtype for spec in specs.values()],
            "shapes": [list(spec.shape) for spec in specs.values()],
        }
        if handles is not None:
            about["ipc_handles_pickled"] = base64.b64encode(handles).decode()
        takes_own, self._takes_own = self._takes_own, False  # one that fails has ended there
        await self._api.update(about)
        self._takes_own = takes_own

    async def finish_update(self) -> None:
        """There is nothing to finish where its own tensors were copied over."""
        if not self._takes_own:
            await self._api.finish_update()
