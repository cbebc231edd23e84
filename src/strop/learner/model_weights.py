"""A model's weights, as they leave the process that holds them: to a folder, or from GPU to GPU."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from strop.engines.receiver import LogprobProbe, TensorSpec, WeightsRefused, probe_ids
from strop.errors import EngineError
from strop.learner.gpu_transfer import Broadcaster, export_handles
from strop.learner.verbs import IpcHandles, WeightVerbs

_COPIED = (".json", ".jinja", ".txt", ".model")
_NOT_COPIED = ("strop.json", "probe.json", ".index.json")


class ModelWeights(WeightVerbs):
    """`source` is the folder that it came from; what goes beside the weights is copied from it."""

    def __init__(self, model: nn.Module, source: Path) -> None:
        self.model: Any = model
        self.source = source
        self._broadcasters: dict[int, Broadcaster] = {}  # by the port that their engine's workers come to

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(_name(p.dtype), tuple(p.shape)) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def probe(self) -> LogprobProbe:
        ids = torch.tensor([probe_ids(int(self.model.config.vocab_size))], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return LogprobProbe(ids[0].tolist(), logprobs.tolist())

    def write(self, folder: Path) -> None:
        fresh = folder.with_name(f".{folder.name}.new")
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            self._fill(fresh)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            why = error.strerror if isinstance(error, OSError) and error.strerror else _system_error(str(error))
            raise EngineError(
                f"the weights cannot be written to {folder}: {why}; the version before is still served: make room "
                "there and resume the run"
            ) from None

    def _fill(self, folder: Path) -> None:
        for file in sorted(self.source.iterdir()):
            if file.suffix in _COPIED and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, folder / file.name)
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        config.pop("torch_dtype", None)
        config["dtype"] = _name(next(self.model.parameters()).dtype)
        (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
        # named_parameters names tied weights once, which is how Hugging Face stores them.
        weights = {name: p.detach().cpu().contiguous() for name, p in self.model.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "probe.json").write_bytes(msgspec.json.encode(self.probe()))
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())

    # -- without files -------------------------------------------------------------------------------------------------

    def export_handles(self) -> IpcHandles:
        self.refuse_broken()
        return export_handles(self.model)

    def release_handles(self) -> None:
        torch.cuda.ipc_collect()

    def listen(self) -> tuple[str, int]:
        broadcaster = Broadcaster.listen()
        self._broadcasters[broadcaster.port] = broadcaster
        return broadcaster.address, broadcaster.port

    def meet(self, port: int, num_workers: int) -> None:
        self._broadcasters[port].meet(num_workers)

    def broadcast(self, port: int) -> None:
        self._broadcasters[port].broadcast(self.model)

    @torch.no_grad()
    def refuse_broken(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise WeightsRefused(f"the weights are broken: {name} has values that are no finite numbers")


def _system_error(text: str) -> str:
    """What the system said, out of what safetensors says about it."""
    said = re.search(r"I/O error: (.+) \(os error \d+\)", text)
    return said[1] if said else text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
