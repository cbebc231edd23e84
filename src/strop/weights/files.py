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

from strop.engines.receiver import LogprobProbe, ModelTensors, WeightReceiver, WeightsRefused
from strop.engines.weight_files import files_of, not_finite, probe_of, refuse_bad
from strop.learner.client import WeightClient
from strop.weights.base import Sent, Transfer


class FolderTransfer(Transfer):
    """Has the learner write each version into a folder of `root`, and servers load it from there. Without a learner the
    folders are somebody else's to write."""

    def __init__(self, root: Path, learner: WeightClient | None = None) -> None:
        self._root = root
        self._learner = learner

    async def stage(self, version: str) -> None:
        if self._learner is not None:
            await self._learner.write(self._root / version)

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        folder = self._root / version
        probe = await asyncio.to_thread(_check_folder, folder, receiver.tensors)
        await receiver.load_folder(folder, version)
        return Sent(receiver.model, probe)

    async def discard_others(self, version: str) -> None:
        await asyncio.to_thread(self._drop_others, self._root / version)

    def _drop_others(self, folder: Path) -> None:
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


def _check_folder(folder: Path, tensors: ModelTensors) -> LogprobProbe | None:
    """Refuse a folder that is not whole and sound; what an engine must find in it."""
    try:
        refuse_bad(folder, tensors)
        return probe_of(folder)
    except OSError as error:
        raise WeightsRefused(f"{folder} cannot be read: {error.strerror}; nothing was changed") from None


class AdapterTransfer(Transfer):
    """Sends a version as a LoRA adapter, from its folder in `root` (PEFT format), beside the weights as they are."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: tuple[WeightReceiver, str] | None = None

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        folder, name = self._root / version, f"{receiver.model}-{version}"
        if bad := await asyncio.to_thread(
            lambda: next((n for file in files_of(folder) for n in not_finite(file)), None)
        ):
            raise WeightsRefused(f"the adapter in {folder} is broken: {bad} has values that are no finite numbers")
        before, self._loaded = self._loaded, (receiver, name)
        if before != (receiver, name):
            await receiver.load_adapter(name, folder)
        if before is not None and before[0] is receiver and before[1] != name:
            await receiver.unload_adapter(before[1])
        return Sent(name, probe_of(folder))
