"""How a token's ratio and advantage become a loss, one number per entry, with methods of the tensors that are given.

    clip        PPO's surrogate (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)
    dual_clip   the same, bounded also where the advantage is negative and the ratio is large (Ye et al. 2019,
                https://arxiv.org/abs/1912.09729)
    gspo        one ratio for all tokens of a turn, the geometric mean of theirs (Zheng et al. 2025,
                https://arxiv.org/abs/2507.18071)
    cispo       the ratio is clipped and held fixed, so that every token keeps a gradient (MiniMax 2025,
                https://arxiv.org/abs/2506.13585)
    plain       no ratio: the policy gradient itself, which is what the others are where the ratio is 1

The ratio is that of the policy now to the proximal one. Its logarithm is held within -20 ... 20, as verl does, so that
one odd token cannot make the loss infinite; beyond that it has no gradient. Of a turn it is held below 10.
"""

from __future__ import annotations

from typing import Literal

from strop.algorithms.base import EntryTensors, Tensor

Loss = Literal["clip", "dual_clip", "gspo", "cispo", "plain"]

LIMIT = 20.0
"""Logarithms of ratios are held within minus this and this."""


def compute_policy_loss(
    kind: Loss, logp: Tensor, proximal: Tensor, entries: EntryTensors, *, low: float, high: float, dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One loss per entry, and per-entry metrics.

    `low` and `high`: ratios are clipped to 1 - low ... 1 + high. `dual`: the most that a ratio counts with a negative
    advantage, for dual_clip.
    """
    advantage = entries.advantage
    log_ratio = (logp - proximal).clamp(-LIMIT, LIMIT)
    metrics: dict[str, Tensor] = {"actor/ppo_kl": -log_ratio.detach()}
    match kind:
        case "clip":
            loss, clipped_at = _surrogate(log_ratio.exp(), advantage, low, high)
        case "dual_clip":
            loss, clipped_at = _surrogate(log_ratio.exp(), advantage, low, high)
            bound = -dual * advantage
            metrics["actor/pg_clipfrac_lower"] = ((loss > bound) & (advantage < 0)).to(loss.dtype)
            loss = loss.minimum(bound).where(advantage < 0, loss)
        case "gspo":
            sums, sizes = sum_over_turns((logp - proximal).detach(), entries.turn)
            # Worth the turn's ratio, with the gradient of the token's own. Taken together before the exponential:
            # the difference is exactly 0, and nothing is rounded away.
            ratio = (logp - logp.detach() + sums / sizes).clamp(max=LIMIT / 2).exp()
            loss, clipped_at = _surrogate(ratio, advantage, low, high)
        case "cispo":
            ratio = log_ratio.detach().exp()
            held = ratio.clamp(1.0 - low, 1.0 + high)
            loss, clipped_at = -held * advantage * logp, held != ratio
        case "plain":
            loss, clipped_at = -advantage * logp, logp.new_zeros(len(logp))
    metrics["actor/pg_loss"] = loss.detach()
    metrics["actor/pg_clipfrac"] = clipped_at.to(loss.dtype)
    return loss, metrics


def sum_over_turns(column: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry the sum of a column over its turn, and the number of the turn's entries. A turn is never cut, so
    all of them are there."""
    names, place = turn.unique(return_inverse=True)
    zeros = column.new_zeros(len(names))
    sums = zeros.index_add(0, place, column)
    sizes = zeros.index_add(0, place, column.new_ones(len(column)))
    return sums[place], sizes[place]


def _surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio x advantage, clipped ratio x advantage), and where the second was the smaller."""
    plain = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    return -plain.minimum(bounded), (bounded < plain).detach()
