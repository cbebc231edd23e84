"""What the embedded engine serves where it is not the very model that the learner trains.

    ModelCopy     another model that follows the trained weights, version by version: rollouts go on meanwhile
    WholeCopy     the same of weights that are sharded over ranks
    AdapterCopy   the trained adapters copied beside weights that nobody changes, which learners and engine share

All have `model`, and `refresh` for a new version.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.config import MAIN
from strop.engines.embedded.adapters import Adapters
from strop.learner import lora
from strop.learner.masters import lower
from strop.learner.sharding import give_memory, iterate_whole


class ServedCopy(ABC):
    """On a GPU it is run in a stream of its own, so that it does not wait behind whatever a learner computes."""

    model: Any

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def refresh(self, policy: str) -> None:
        """Take a policy's weights as they are now. Nobody may be at work with them meanwhile."""
        if self._stream is not None:
            torch.cuda.synchronize()
        self._take(policy)
        if self._stream is not None:
            torch.cuda.synchronize()

    @abstractmethod
    def _take(self, policy: str) -> None: ...


class ModelCopy(ServedCopy):
    """A copy of the model given, as it was when it was last refreshed."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__(next(of.parameters()).device)
        self._of = of
        self.model = copy.deepcopy(of).requires_grad_(False)

    @torch.no_grad()
    def _take(self, policy: str) -> None:
        ours: list[Tensor] = [*self.model.parameters()]
        theirs: list[Tensor] = [*self._of.parameters()]
        torch._foreach_copy_(ours, theirs)  # pyright: ignore[reportPrivateImportUsage]


class WholeCopy(ServedCopy):
    """The whole of a model, which is sharded once this is made, in the dtype that is computed in and as it was when it
    was last refreshed. All ranks have one, and refresh it at once. `stale`: it has changed since."""

    def __init__(self, of: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(device)
        self.stale = True
        self._sharded = of
        self._dtype = dtype
        self.model = copy.deepcopy(of).requires_grad_(False)
        lower(self.model, dtype)
        give_memory(self.model, device)
        nn.Module.to(self.model, device)

    def refresh(self, policy: str = MAIN) -> None:
        if self.stale:
            super().refresh(policy)
            self.stale = False

    @torch.no_grad()
    def _take(self, policy: str) -> None:
        values = iterate_whole(self._sharded.parameters(), self._dtype)
        for ours, whole in zip(self.model.parameters(), values, strict=True):
            ours.copy_(whole)


class AdapterCopy(ServedCopy):
    """The model given, with its own weights, and a copy of each policy's adapter. `adapted` are the models that the
    adapters are in; of a policy that is None the plain model is served. There may be `rows` sequences."""

    def __init__(self, base: PreTrainedModel, adapted: Mapping[str, PreTrainedModel | None], *, rows: int) -> None:
        super().__init__(base.device)
        self.model = lora.share_weights(base)
        self._adapted = {policy: model for policy, model in adapted.items() if model is not None}
        matrices = {policy: lora.read_matrices(model) for policy, model in self._adapted.items()}
        ranks = {policy: matrices[policy].rank if policy in matrices else 0 for policy in adapted}
        layers = {name for each in matrices.values() for name in each.layers}
        self.adapters = Adapters(self.model, ranks, layers, rows=rows)
        for policy in self._adapted:
            self._take(policy)

    def _take(self, policy: str) -> None:
        if policy in self._adapted:
            self.adapters.load(policy, lora.read_matrices(self._adapted[policy]))
