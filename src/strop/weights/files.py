"""A folder per version, in Hugging Face format: written by the process that holds the weights, read by engines.

    weights/1.7/model.safetensors   every parameter
                config.json, ...    what belongs to it, so that it is a model like any other
                probe.json          what the engine must find in it

A folder is there whole or not at all. The one that is served stays until the next one is, and is what an engine that
was started again gets. Every tensor's name, shape and values are looked at before an engine hears of it.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from strop.engines.base import Engine
from strop.engines.delivery import Delivered, ModelTensors, WeightsRefused
from strop.engines.weight_files import files_of, not_finite, probe_of, refuse_bad
from strop.learner.client import WeightClient
from strop.weights.base import Weights

if TYPE_CHECKING:
    from strop.engines.vllm.protocol import Api


class Files(Weights):
    """Has the learner write each version into a folder of `root`, and `engine` load it from there."""

    def __init__(self, root: Path, learner: WeightClient, engine: Engine) -> None:
        self._root = root
        self._learner = learner
        self._engine = engine

    async def publish(self, version: str) -> None:
        folder = self._root / version
        await self._learner.write(folder)
        await self._engine.load(version)
        await asyncio.to_thread(self._drop_others, folder)

    def _drop_others(self, folder: Path) -> None:
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


class Folders:
    """Delivers a version from its folder in `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def deliver(self, api: Api, version: str, model: ModelTensors) -> Delivered:
        folder = self._root / version
        await asyncio.to_thread(refuse_bad, folder, model)
        await api.reload(str(folder))
        return Delivered(api.base, probe_of(folder))


class Adapters:
    """Delivers a version as a LoRA adapter, from its folder in `root` (PEFT format), beside the weights as they are."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: tuple[Api, str] | None = None

    async def deliver(self, api: Api, version: str, model: ModelTensors) -> Delivered:
        folder, name = self._root / version, f"{api.base}-{version}"
        if bad := await asyncio.to_thread(
            lambda: next((n for file in files_of(folder) for n in not_finite(file)), None)
        ):
            raise WeightsRefused(f"the adapter in {folder} is broken: {bad} has values that are no finite numbers")
        before, self._loaded = self._loaded, (api, name)
        if before != (api, name):
            await api.load_adapter(name, str(folder))
        if before is not None and before[0] is api and before[1] != name:
            await api.unload_adapter(before[1])
        return Delivered(name, probe_of(folder))
