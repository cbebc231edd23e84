"""RMS norms by one kernel each, instead of the eight that a Hugging Face model launches for one.

A pass that decodes is a thousand kernels of a few microseconds, however little each has to do; a third of them are
parts of norms. The learner never sees it: `using` puts the kernel in place for one pass. What it computes is rounded
once and not twice, so it is not bit for bit the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

ROUNDINGS = 4
"""How many roundings of its dtype a norm may be off to be the same norm."""


class FusedNorms:
    """The norms of a model that torch has a kernel for: those that give the same when they are tried."""

    def __init__(self, model: nn.Module) -> None:
        found = [(module, _fuse(module)) for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        self._forwards = [(module, forward) for module, forward in found if forward is not None]

    def __len__(self) -> int:
        return len(self._forwards)

    @contextmanager
    def using(self) -> Iterator[None]:
        """They are computed by that kernel until the end of the block."""
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.__dict__["forward"]


@torch.inference_mode()
def _fuse(module: Any) -> Callable[[Tensor], Tensor] | None:
    """The module's forward by one kernel, or None where its own is another."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float) or "forward" in vars(module):
        return None

    def forward(hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, (len(module.weight),), module.weight, eps)

    size = len(weight)
    tried = torch.linspace(-3.0, 4.0, 2 * size, dtype=torch.float64).view(2, size).to(weight.device, weight.dtype)
    wanted, ours = module(tried), forward(tried)
    alike = wanted.dtype == ours.dtype and wanted.shape == ours.shape
    near = ROUNDINGS * torch.finfo(weight.dtype).eps * wanted.abs() if alike else wanted
    return forward if alike and bool(((ours - wanted).abs() <= near).all()) else None
