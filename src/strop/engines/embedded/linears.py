"""Weights laid out once for the CPU's matrix routine, instead of anew in every decode step.

A step that decodes is small: 32 rows through every matrix of the model. Half as much time as it multiplies, the routine
then spends on bringing the matrix into the order in which it reads it. Here that is done once per version, at the cost
of a second copy of the weights. The learner never sees it: `using` puts it in place for one pass.

The order depends on the number of rows, so passes of at least half of `rows` are padded to it and others take the
model's own weights. Only for fp32 on a CPU whose torch has MKL; elsewhere nothing is laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

SMALLEST = 2**15
"""Matrices with fewer weights are left alone: they are in the processor's cache anyway."""


class Linears:
    def __init__(self, model: Any, rows: int) -> None:
        self._rows = rows
        self._modules = [m for m in model.modules() if type(m) is torch.nn.Linear and _can_be_laid_out(m.weight)]
        self._forwards: list[Callable[[Tensor], Tensor]] = []
        self.refresh()

    def refresh(self) -> None:
        """The weights have changed."""
        self._forwards.clear()  # first, so that never two copies exist beside the weights
        self._forwards += [_forward(module, self._rows) for module in self._modules]

    @contextmanager
    def using(self) -> Iterator[None]:
        """Modules have their weights laid out until the end of the block."""
        for module, forward in zip(self._modules, self._forwards, strict=True):
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in self._modules:
                del module.__dict__["forward"]


def _can_be_laid_out(weight: Tensor) -> bool:
    return (
        torch.backends.mkl.is_available()
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= SMALLEST
    )


def _forward(module: torch.nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    weight, bias = module.weight.detach(), module.bias
    laid_out = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)

    def forward(x: Tensor) -> Tensor:
        count = x.numel() // x.shape[-1]
        if not rows <= 2 * count <= 2 * rows:
            return linear(x, weight, bias)
        flat = x.reshape(count, -1)
        if count < rows:
            flat = pad(flat, (0, 0, 0, rows - count))
        out = torch.ops.mkl._mkl_linear(flat, laid_out, weight, bias, rows)
        return out[:count].view(*x.shape[:-1], -1)

    return forward
