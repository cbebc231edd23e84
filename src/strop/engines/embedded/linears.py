"""Weights laid out once for the CPU's matrix routine, instead of anew in every pass.

A step that decodes is small: a few rows through every matrix of the model. Half as much time as it multiplies, the
plain routine then spends on bringing the matrix into the order in which it reads it. Here that is done once per
version, at the cost of a second copy of the weights. The learner never sees it: `using` puts it in place for one pass.

torch has two routines that take such a copy. Which is faster depends on the processor (MKL leaves half of what some
can do unused, oneDNN does not), so they are tried once, on matrices of a usual size. Layers that are given the same
tensor one after the other, as queries, keys and values are, lie in one matrix.

MKL promises results for the number of rows that a matrix was laid out for; it gives them for any. That is not taken on
trust: the first time a shape and a number of rows come together both ways are computed and compared.

Only for fp32 on a CPU whose torch has MKL; elsewhere nothing is laid out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

SMALLEST = 2**15
"""Matrices with fewer weights are left alone: they are in the processor's cache anyway."""
FEW, MANY = 32, 256
"""Rows that matrices are laid out for, and those of a pass in which the multiplying takes nearly all of the time."""
EACH = 64
"""Up to so many rows every number of them is compared with the plain routine, above one of each power of two."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that are given the same tensor. It is looked at whether they really are."""


@dataclass(frozen=True)
class WeightFormat:
    """A matrix routine with an order of its own: `reorder` a weight once, then `multiply` rows with the copy, told
    the shape by a tensor like the weight."""

    reorder: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    any_rows: bool = False
    """It is also faster than the plain routine for many rows."""


def _multiply_by_mkl(x: Tensor, laid_out: Tensor, like: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkl._mkl_linear(x, laid_out, like, bias, x.numel() // x.shape[-1])


def _multiply_by_onednn(x: Tensor, laid_out: Tensor, like: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")


MKL = WeightFormat(lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, FEW), _multiply_by_mkl)
ONEDNN = WeightFormat(lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, FEW), _multiply_by_onednn)


@cache
@torch.inference_mode()
def choose_format() -> WeightFormat:
    """The faster routine here. It takes some hundredths of a second."""
    weight = torch.ones(1536, 576)
    few, many = torch.ones(FEW, 576), torch.ones(MANY, 576)

    def try_with(format: WeightFormat) -> Callable[[Tensor], Tensor]:
        laid_out = format.reorder(weight)
        return lambda x: format.multiply(x, laid_out, weight, None)

    best, multiply = MKL, try_with(MKL)
    if torch.backends.mkldnn.is_available():
        other = try_with(ONEDNN)
        by_mkl, by_onednn = _measure([lambda: multiply(few), lambda: other(few)])
        if by_onednn < 0.9 * by_mkl:
            best, multiply = ONEDNN, other
    plain, ours = _measure([lambda: linear(many, weight), lambda: multiply(many)])
    return WeightFormat(best.reorder, best.multiply, any_rows=ours < 0.9 * plain)


def _measure(ways: Sequence[Callable[[], Tensor]]) -> list[float]:
    """The least seconds that each took, in turns."""
    best = [float("inf")] * len(ways)
    for _ in range(8):
        for number, way in enumerate(ways):
            begin = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best


class Linears:
    def __init__(self, model: Any) -> None:
        plain = [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]
        layers = {id(module): module for module in plain if _can_be_laid_out(module.weight)}
        self._groups: list[list[torch.nn.Linear]] = []
        for parent in model.modules():
            for names in TOGETHER:
                found = [getattr(parent, name, None) for name in names]
                found = [getattr(child, "base_layer", child) for child in found]  # inside an adapter
                if all(id(child) in layers for child in found) and _can_be_joined(found):
                    self._groups.append([layers.pop(id(child)) for child in found])
        self._groups += [[module] for module in layers.values()]
        self._modules = [module for group in self._groups for module in group]
        self._forwards: list[Callable[[Tensor], Tensor]] = []
        self._agrees: dict[tuple[int, int, int], bool] = {}  # by rows and shape
        self.refresh()

    def refresh(self) -> None:
        """The weights have changed."""
        self._forwards.clear()  # first, so that never two copies exist beside the weights
        for group in self._groups:
            joined = JoinedLinear(group, choose_format(), self._agrees)
            self._forwards += [joined.forward_of(number) for number in range(len(group))]

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


class JoinedLinear:
    """Layers of one input in one matrix. The first that is called computes for all; each output is given out once, and
    only for the very tensor that it was computed from."""

    def __init__(
        self, modules: Sequence[torch.nn.Linear], format: WeightFormat, agrees: dict[tuple[int, int, int], bool]
    ) -> None:
        self._plain = [(module.weight.detach(), _detach(module.bias)) for module in modules]
        self._sizes = [module.out_features for module in modules]
        self._format = format
        self._agrees = agrees
        weights, biases = [weight for weight, _ in self._plain], [bias for _, bias in self._plain if bias is not None]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._laid_out = format.reorder(whole)
        self._like = whole.new_empty(1).expand(whole.shape)  # without the memory: only its shape is asked for
        self._bias = torch.cat(biases) if biases else None
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = [None] * len(modules)

    def forward_of(self, number: int) -> Callable[[Tensor], Tensor]:
        if len(self._plain) == 1:
            return self._compute

        def forward(x: Tensor) -> Tensor:
            output = self._outputs[number]
            if x is not self._input or output is None:
                self._outputs = list(self._compute(x).split(self._sizes, -1))
                self._input, output = x, self._outputs[number]
                assert output is not None
            self._outputs[number] = None
            return output

        return forward

    def _compute(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        size = rows if rows <= EACH else 1 << rows.bit_length()
        where = (size, self._like.shape[0], self._like.shape[1])
        agrees = self._agrees.get(where) if rows > 0 and (rows <= EACH or self._format.any_rows) else False
        if agrees is False:
            return self._compute_plainly(x)
        out = self._format.multiply(x, self._laid_out, self._like, self._bias)
        if agrees is None:
            plain = self._compute_plainly(x)
            if plain.isfinite().all():  # of other numbers nothing can be said
                self._agrees[where] = bool((out - plain).abs().max() <= 1e-4 * plain.abs().max())
            return plain
        return out

    def _compute_plainly(self, x: Tensor) -> Tensor:
        found = [linear(x, weight, bias) for weight, bias in self._plain]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


def _detach(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _can_be_joined(modules: Sequence[Any]) -> bool:
    return len({module.in_features for module in modules}) == 1 == len({module.bias is None for module in modules})


def _can_be_laid_out(weight: Tensor) -> bool:
    return (
        torch.backends.mkl.is_available()
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= SMALLEST
    )
