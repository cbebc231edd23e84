"""AdamW with linear warm-up and decay, and gradient clipping. Parameters are updated in place: engines share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from strop.config import OptimConfig
from strop.errors import LearnerError


class Optim:
    """`steps` counts optimizer steps; warm-up and decay are measured in them."""

    def __init__(self, module: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.steps = 0
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        # Decay shrinks matrices; norms and biases have no reason to go to 0.
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas)

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        warm = min(1.0, (self.steps + 1) / max(1, self.config.warmup))
        left = 1.0 if self.config.decay is None else max(0.0, 1.0 - self.steps / self.config.decay)
        return self.config.lr * warm * left

    def step(self) -> float:
        """Clip, update, clear the gradients; returns the norm before clipping. Refuses NaN with the weights as were."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip))
        if not torch.isfinite(torch.tensor(norm)):
            self.clear()
            raise LearnerError(f"the gradient's norm is {norm}: nothing was updated; lower learner.optim.lr")
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        self.steps += 1
        self.clear()
        return norm

    def clear(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.adam.load_state_dict(state["adam"])
