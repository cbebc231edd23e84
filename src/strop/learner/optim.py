"""AdamW with warm-up and decay, and gradient clipping. Parameters are updated in place: engines share them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from strop.config import OptimConfig
from strop.learner.masters import Masters
from strop.learner.ranks import ALONE, Ranks
from strop.learner.sharding import gather, lay_out

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optim:
    """`steps` counts optimizer steps; warm-up and decay are measured in them, of which a run has `whole`: a schedule
    without a `decay` of its own falls over those.

    `masters` are trained in the place of the parameters that have them. With `offload` whatever only a step needs is in
    the CPU's memory otherwise. With several `ranks` gradients are summed over them.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        masters: dict[nn.Parameter, Tensor] | None = None,
        *,
        offload: bool = False,
        whole: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self._ranks = ranks
        self.schedule = config.schedule or ("constant" if config.decay is None else "linear")
        self.decay = config.decay or whole
        assert self.decay or self.schedule == "constant", f"{self.schedule} over how many steps?"
        self.steps = 0
        self.module = module
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.masters = Masters({p: masters[p] for p in parameters if p in masters} if masters else {})
        self.trained = [self.master(p) for p in parameters]
        # Decay shrinks matrices; norms and biases have no reason to go to 0.
        groups = [
            {"params": [p for p in self.trained if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=True)
        self.device = parameters[0].device
        self.offload = offload and self.device.type == "cuda"
        self._send_away()

    def master(self, parameter: nn.Parameter) -> Tensor:
        """What is really trained of a parameter."""
        return self.masters.of.get(parameter, parameter)

    def weights(self) -> dict[str, Tensor]:
        """All that is trained, by its name in the module; tied weights once, which is how Hugging Face stores them."""
        return {n: self.master(p) for n, p in self.module.named_parameters() if p.requires_grad}

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        warm = min(1.0, (self.steps + 1) / max(1, self.config.warmup))
        if self.schedule == "constant":
            return self.config.lr * warm
        left = max(0.0, 1.0 - self.steps / self.decay)
        if self.schedule == "cosine":
            left = 0.5 - 0.5 * math.cos(math.pi * left)
        return self.config.lr * warm * left

    def clip(self) -> Tensor:
        """Clip the gradients; returns their norm before that, which nobody has waited for. `step` or `clear` comes
        next."""
        self._bring_back()  # gradients are where the masters are
        self.masters.take_gradients()
        self._ranks.sum_gradients(self.trained)
        return gather(nn.utils.clip_grad_norm_(self.trained, self.config.grad_clip))

    def step(self) -> None:
        """Update with the clipped gradients, and clear them."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        self.masters.write()
        self.steps += 1
        self.clear()

    def clear(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        self.masters.forget_gradients()
        self._send_away()

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take back a state, once `weights` have been."""
        self.masters.write()
        self.steps = state["steps"]
        self._bring_back()  # AdamW takes its state to where the weights are
        trained = self._in_order()
        moments = {
            number: {name: lay_out(value, trained[number]) for name, value in of.items()}
            for number, of in state["adam"]["state"].items()
        }
        self.adam.load_state_dict(state["adam"] | {"state": moments})
        self._send_away()

    def moments(self) -> dict[str, Tensor]:
        """Where each moment is in AdamW's state, with what is trained by it."""
        return {f"{k}/{name}": tensor for k, tensor in enumerate(self._in_order()) for name in MOMENTS}

    def _in_order(self) -> list[Tensor]:
        """As AdamW counts them."""
        return [tensor for group in self.adam.param_groups for tensor in group["params"]]

    # -- offload -------------------------------------------------------------------------------------------------------

    def _movable(self) -> list[Tensor]:
        moments = [state[name] for state in self.adam.state.values() for name in MOMENTS]
        return [*self.masters.of.values(), *moments] if self.offload else []

    def _send_away(self) -> None:
        for tensor in self._movable():
            if tensor.device != torch.device("cpu"):
                tensor.data = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)

    def _bring_back(self) -> None:
        for tensor in self._movable():
            tensor.data = tensor.data.to(self.device)
