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

from strop.config import MAIN
from strop.engines.receiver import LogprobProbe, ModelTensors, WeightReceiver, WeightsRefused
from strop.engines.weight_files import find_broken, list_files, read_probe, refuse_bad
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
        await asyncio.to_thread(_drop_others, self._root / version)


def _drop_others(folder: Path) -> None:
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _check_folder(folder: Path, tensors: ModelTensors) -> LogprobProbe | None:
    """Refuse a folder that is not whole and sound; what an engine must find in it."""
    try:
        refuse_bad(folder, tensors)
        return read_probe(folder)
    except OSError as error:
        raise WeightsRefused(f"{folder} cannot be read: {error.strerror}; nothing was changed") from None


class AdapterTransfer(Transfer):
    """Sends each version of a policy as a LoRA adapter, from a folder of `root` (PEFT format); without a learner those
    are somebody else's to write. Servers know a version by a name of its own: the keys that they have cached for one
    are never taken for another's."""

    beside = True

    def __init__(self, root: Path, policy: str = MAIN, learner: WeightClient | None = None) -> None:
        self._root, self._policy, self._learner = root, policy, learner

    async def stage(self, version: str) -> None:
        if self._learner is not None:
            await self._learner.write_adapter(self._root / version)

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        return await send_adapter(self._root / version, f"{self._policy}-{version}", receiver)

    async def discard_others(self, version: str) -> None:
        if self._learner is not None:
            await asyncio.to_thread(_drop_others, self._root / version)


async def send_adapter(folder: Path, name: str, receiver: WeightReceiver) -> Sent:
    """Have a server load the adapter in `folder` under a name that begins with `name`, once it is known to be sound."""
    await asyncio.to_thread(_check_adapter, folder)
    return Sent(await receiver.load_adapter(name, folder), read_probe(folder))


def _check_adapter(folder: Path) -> None:
    if not folder.is_dir():
        raise WeightsRefused(f"{folder} is not there any more: the engine serves again from the next version on")
    if bad := next((name for file in list_files(folder) for name in find_broken(file)), None):
        raise WeightsRefused(f"the adapter in {folder} is broken: {bad} has values that are not finite numbers")
