"""Per-entry losses that algorithms share, written with methods of the tensors they are given."""

from __future__ import annotations

from strop.algorithms.base import Tensor


def clipped(
    logp: Tensor, proximal: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: -min(ratio x advantage, clip(ratio, 1 - low, 1 + high) x advantage).

    Where proximal is NaN nothing was scored: this is the first optimizer step since the weights that the step began
    with, and the proximal policy is the policy itself.
    """
    proximal = proximal.where(~proximal.isnan(), logp.detach())
    log_ratio = logp - proximal
    ratio = log_ratio.exp()
    plain = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    loss = -plain.minimum(bounded)
    metrics = {
        "actor/pg_loss": loss.detach(),
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/pg_clipfrac": (bounded < plain).detach().to(loss.dtype),
    }
    return loss, metrics
