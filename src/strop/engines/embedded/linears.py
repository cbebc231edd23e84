"""Weights laid out once for the CPU's matrix routine, instead of anew in every decode step.

A step that decodes is small: a few rows through every matrix of the model. Half as much time as it multiplies, the
routine then spends on bringing the matrix into the order in which it reads it. Here that is done once per version, at
the cost of a second copy of the weights. The learner never sees it: `using` puts it in place for one pass.

MKL promises results for the number of rows that a matrix was laid out for; it gives them for any. That is not taken on
trust: the first time a shape and a number of rows come together both ways are computed and compared.

Only for fp32 on a CPU whose torch has MKL; elsewhere nothing is laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

SMALLEST = 2**15
"""Matrices with fewer weights are left alone: they are in the processor's cache anyway."""
MOST = 64
"""Passes of more rows take the model's own weights: there the multiplying is what takes the time."""
HINT = 32
"""Rows that matrices are laid out for."""


class Linears:
    def __init__(self, model: Any) -> None:
        plain = [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]
        self._modules = [module for module in plain if _can_be_laid_out(module.weight)]
        self._forwards: list[Callable[[Tensor], Tensor]] = []
        self._agrees: dict[tuple[int, int, int], bool] = {}  # by rows and shape
        self.refresh()

    def refresh(self) -> None:
        """The weights have changed."""
        self._forwards.clear()  # first, so that never two copies exist beside the weights
        self._forwards += [self._forward(module) for module in self._modules]

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

    def _forward(self, module: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
        weight, bias = module.weight.detach(), module.bias
        laid_out = torch.ops.mkl._mkl_reorder_linear_weight(weight, HINT)

        def forward(x: Tensor) -> Tensor:
            count = x.numel() // x.shape[-1]
            where = (count, weight.shape[0], weight.shape[1])
            agrees = self._agrees.get(where) if 0 < count <= MOST else False
            if agrees is False:
                return linear(x, weight, bias)
            out = torch.ops.mkl._mkl_linear(x, laid_out, weight, bias, count)
            return out if agrees else self._compare(out, linear(x, weight, bias), where)

        return forward

    def _compare(self, out: Tensor, plain: Tensor, where: tuple[int, int, int]) -> Tensor:
        if plain.isfinite().all():  # of other numbers nothing can be said
            self._agrees[where] = bool((out - plain).abs().max() <= 1e-4 * plain.abs().max())
        return plain


def _can_be_laid_out(weight: Tensor) -> bool:
    return (
        torch.backends.mkl.is_available()
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= SMALLEST
    )
