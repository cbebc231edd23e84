"""Master weights: what is computed in bfloat16 is trained in float32.

A step of the optimizer is often smaller than the gap between two bfloat16 numbers, and so is a micro-batch's part of a
gradient. Both are therefore summed up in float32: the optimizer changes a master of every trained parameter, and what
each backward pass leaves in a parameter's gradient is added to the master's at once. There is no loss scaling: bfloat16
has float32's range.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def lower(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Put every parameter of `module` into `dtype` and return what the trained ones were. Buffers stay as they are:
    positions are computed from them, and need their digits."""
    masters: dict[nn.Parameter, Tensor] = {}
    for parameter in module.parameters():
        if parameter.dtype != dtype:
            if parameter.requires_grad:
                masters[parameter] = parameter.data
            parameter.data = parameter.data.to(dtype)
    return masters


class Masters:
    """The masters of some parameters, and the sums of their gradients. `of[p]` is p's."""

    def __init__(self, of: dict[nn.Parameter, Tensor]) -> None:
        self.of = of
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in of:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if parameter in self._sums:
            self._sums[parameter] += parameter.grad
        else:
            self._sums[parameter] = parameter.grad.to(self.of[parameter].dtype)
        parameter.grad = None

    @torch.no_grad()
    def add(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Gradients of many parameters at once, which are somebody else's memory."""
        fresh = {p: torch.empty_like(self.of[p]) for p in gradients if p not in self._sums}
        known = [p for p in gradients if p in self._sums]
        if fresh:
            torch._foreach_copy_(list(fresh.values()), [gradients[p] for p in fresh])  # pyright: ignore[reportPrivateImportUsage]
        if known:
            torch._foreach_add_([self._sums[p] for p in known], [gradients[p] for p in known])  # pyright: ignore[reportPrivateImportUsage]
        self._sums |= fresh

    def take_gradients(self) -> None:
        """Give each master its sum, and begin new ones."""
        for parameter, total in self._sums.items():
            self.of[parameter].grad = total
        self._sums.clear()

    def forget_gradients(self) -> None:
        self._sums.clear()

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the parameters, in place."""
        if self.of:
            torch._foreach_copy_(list(self.of), list(self.of.values()))  # pyright: ignore[reportPrivateImportUsage]
