"""A model's weights, as they leave the process that holds them: to a folder, or from GPU to GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from strop.engines.receiver import LogprobProbe, TensorSpec, WeightsRefused, probe_ids
from strop.errors import EngineError
from strop.files import sync_folder
from strop.learner import checkpoint, lora
from strop.learner.gpu_transfer import Broadcaster, HandleExporter
from strop.learner.verbs import IpcHandles, WeightVerbs


class ModelWeights(WeightVerbs):
    """`source` is the folder that it came from; what goes beside the weights is copied from it. `address`: see
    `RankPlace`."""

    def __init__(self, model: nn.Module, source: Path, address: str = "") -> None:
        self.model: Any = model
        self.source = source
        self._address = address
        self._exporter: HandleExporter | None = None
        self._broadcasters: dict[int, Broadcaster] = {}  # by the port that their engine's workers come to

    def specs(self) -> dict[str, TensorSpec]:
        return describe_tensors(dict(self.model.named_parameters()))

    @torch.no_grad()
    def probe(self) -> LogprobProbe:
        ids = torch.tensor([probe_ids(int(self.model.config.vocab_size))], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return LogprobProbe(ids[0].tolist(), logprobs.tolist())

    def write(self, folder: Path) -> None:
        with write_version(folder) as fresh:
            # named_parameters names tied weights once, which is how Hugging Face stores them.
            checkpoint.write(fresh, dict(self.model.named_parameters()), None, self.source)
            (fresh / "probe.json").write_bytes(msgspec.json.encode(self.probe()))
            sync_folder(fresh, whole=True)

    def write_adapter(self, folder: Path) -> None:
        """Not synced to the disk: it is for an engine that runs now, and made again for one that runs later."""
        assert isinstance(self.model, lora.Merged), "there is an adapter"
        trained = self.model.adapter
        weights = {name: tensor for name, tensor in trained.named_parameters() if ".lora_" in name}
        with write_version(folder) as fresh:
            checkpoint.write(fresh, weights, lora.describe(trained, self.source), self.source)
            (fresh / "probe.json").write_bytes(msgspec.json.encode(self.probe()))

    # -- without files -------------------------------------------------------------------------------------------------

    def export_handles(self, fused: dict[str, tuple[str, ...]] | None) -> IpcHandles:
        self.refuse_broken()
        if isinstance(self.model, lora.Merged):  # its tensors are brought up to date as they are read
            fused = None
        if self._exporter is None or self._exporter.fused != fused:
            self._exporter = HandleExporter(fused)
        return self._exporter.export(dict(self.model.named_parameters()))

    def listen(self) -> tuple[str, int]:
        broadcaster = Broadcaster.listen(self._address)
        self._broadcasters[broadcaster.port] = broadcaster
        return broadcaster.address, broadcaster.port

    def meet(self, port: int, num_workers: int) -> None:
        self._broadcasters[port].meet(num_workers)

    def broadcast(self, port: int) -> None:
        self._broadcasters[port].broadcast(tensor.detach() for _, tensor in self.model.named_parameters())

    @torch.no_grad()
    def refuse_broken(self) -> None:
        # A norm is finite where every value is, unless it overflows: only then each value is looked at. All norms are
        # computed by a few kernels and asked for at once, since a GPU is waited for each time.
        parameters = dict(self.model.named_parameters())
        norms = torch._foreach_norm(list(parameters.values()), 2)  # pyright: ignore[reportPrivateImportUsage]
        for name, finite in zip(parameters, torch.isfinite(torch.stack(norms)).tolist(), strict=True):
            if not finite and not torch.isfinite(parameters[name]).all():
                raise WeightsRefused(f"the weights are broken: {name} has values that are not finite numbers")


class FollowingRank(WeightVerbs):
    """Ranks beside the first, where each has the whole: it does all."""

    def specs(self) -> dict[str, TensorSpec]:
        return {}

    def probe(self) -> LogprobProbe:
        return LogprobProbe([], [])

    def write(self, folder: Path) -> None:
        pass

    def write_adapter(self, folder: Path) -> None:
        pass

    def refuse_broken(self) -> None:
        pass

    def export_handles(self, fused: dict[str, tuple[str, ...]] | None) -> IpcHandles:
        return IpcHandles({}, {}, b"")

    def listen(self) -> tuple[str, int]:
        return "", 0

    def meet(self, port: int, num_workers: int) -> None:
        pass

    def broadcast(self, port: int) -> None:
        pass


@contextmanager
def write_version(folder: Path) -> Iterator[Path]:
    """A sibling to write a version's folder into, which takes its name at the end of the block."""
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) and error.strerror else _system_error(str(error))
        raise EngineError(
            f"the weights cannot be written to {folder}: {why}; the version before is still served. Fix: free some "
            "space there and resume the run"
        ) from None


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """What is known of tensors without their values."""
    return {n: TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}


def _system_error(text: str) -> str:
    """What the system said, out of what safetensors says about it."""
    said = re.search(r"I/O error: (.+) \(os error \d+\)", text)
    return said[1] if said else text
