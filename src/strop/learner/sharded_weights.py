"""The weights of a sharded model, as they leave the ranks that hold its parts.

    all ranks    put one tensor after the other together, in the dtype that is computed in
    the first    writes it to a file, or sends it to an engine's GPUs, and forgets it

So no rank needs room for more than its part and a tensor. Left out: handles of GPU memory (ipc), since the whole of a
tensor does not stay anywhere; they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.engines.base import GivenAnswer
from strop.engines.receiver import LogprobProbe, TensorSpec, WeightsRefused, probe_ids
from strop.files import sync_folder
from strop.learner import checkpoint
from strop.learner.answers import score_answers
from strop.learner.gpu_transfer import Broadcaster
from strop.learner.model_weights import describe_tensors, write_version
from strop.learner.sharding import exhaust, iterate_whole
from strop.learner.summed_file import order_tensors
from strop.learner.verbs import IpcHandles, WeightVerbs

if TYPE_CHECKING:
    from strop.learner.learner import Learner


class ShardedWeights(WeightVerbs):
    """Every rank has one, and does every verb. `source` is the folder that the model came from."""

    def __init__(self, learner: Learner, source: Path) -> None:
        self._learner, self._source = learner, source
        self._leads = learner.ranks.leads
        self._broadcasters: dict[int, Broadcaster] = {}

    def _outline(self) -> dict[str, Tensor]:
        """The whole tensors, without values."""
        own, dtype = self._learner.model.named_parameters(), self._learner.dtype
        return {name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in own}

    def _give(self, names: list[str], take: Callable[[Iterator[Tensor]], None]) -> None:
        """Put tensors together, one after the other, on all ranks; the first one takes them."""
        own = dict(self._learner.model.named_parameters())
        values = iterate_whole((own[name] for name in names), self._learner.dtype)
        try:
            if self._leads:
                take(values)
        finally:  # the others do not know of what went wrong here
            exhaust(values)

    def specs(self) -> dict[str, TensorSpec]:
        return describe_tensors(self._outline())

    def probe(self) -> LogprobProbe:
        ids = probe_ids(int(self._learner.model.config.vocab_size))
        answer = GivenAnswer(prompt_ids=ids[:1], response_ids=ids[1:])
        (found,) = score_answers(self._learner.read_entries, [answer], len(ids))
        return LogprobProbe(ids, found)

    def write(self, folder: Path) -> None:
        outline, probe = self._outline(), self.probe()

        def take(values: Iterator[Tensor]) -> None:
            with write_version(folder) as fresh:
                checkpoint.write(fresh, outline, None, self._source, values)
                (fresh / "probe.json").write_bytes(msgspec.json.encode(probe))
                sync_folder(fresh, whole=True)

        self._give(order_tensors(outline), take)

    def write_adapter(self, folder: Path) -> None:
        raise AssertionError("of an adapter every rank has the whole")

    @torch.no_grad()
    def refuse_broken(self) -> None:
        own = dict(self._learner.model.named_parameters())
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in own.values()]
        broken = torch.stack([(~torch.isfinite(part)).any() for part in parts]).float()
        self._learner.ranks.sum(broken)
        for name, found in zip(own, broken.tolist(), strict=True):
            if found:
                raise WeightsRefused(f"the weights are broken: {name} has values that are not finite numbers")

    # -- without files -------------------------------------------------------------------------------------------------

    def export_handles(self, fused: dict[str, tuple[str, ...]] | None) -> IpcHandles:
        raise WeightsRefused(
            "weights that are sharded over several ranks have no handles. Fix: set engine.vllm.weights to files or nccl"
        )

    def listen(self) -> tuple[str, int]:
        if not self._leads:
            return "", 0
        broadcaster = Broadcaster.listen(self._learner.ranks.address)
        self._broadcasters[broadcaster.port] = broadcaster
        return broadcaster.address, broadcaster.port

    def meet(self, port: int, num_workers: int) -> None:
        if self._leads:
            self._broadcasters[port].meet(num_workers)

    def broadcast(self, port: int) -> None:
        names = [name for name, _ in self._learner.model.named_parameters()]
        self._give(names, lambda values: self._broadcasters[port].broadcast(values))
