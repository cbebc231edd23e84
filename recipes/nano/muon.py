"""Muon in fp32: momentum whose matrices are made orthogonal before they are applied (Jordan et al., 2024).

It learns to copy digits much sooner: after 400 steps of 24 clean conversations 99 % of first calls were predicted
exactly, 24 % with AdamW at 3e-3. `torch.optim.Muon` computes in bf16, which some CPUs cannot do.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch


class Muon(torch.optim.Optimizer):
    """For the weight matrices of the layers; embeddings and norms belong to AdamW."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for matrix in group["params"]:
                by_shape[tuple(matrix.shape)].append(matrix)
            for (rows, columns), matrices in by_shape.items():
                directions = orthogonal(torch.stack([self._direction(m, group["momentum"]) for m in matrices]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for matrix, direction in zip(matrices, directions, strict=True):
                    matrix.add_(direction, alpha=-scale)

    def _direction(self, matrix: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        assert matrix.grad is not None
        average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)


def orthogonal(stack: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix to each of stack[N, rows, columns], roughly: five Newton-Schulz iterations."""
    x = stack.mT if stack.shape[1] > stack.shape[2] else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x.mT if stack.shape[1] > stack.shape[2] else x
