"""Importance-sampling correction: for tokens that other weights, or other arithmetic, sampled than the learner's when
the step began.

The importance ratio, exp(proximal - behaviour), says how much likelier the learner finds a token than the engine did:

    token       truncated importance sampling: every token counts its ratio, at most `high`
    sequence    the same with the product of its turn's ratios
    icepop      masking: a token counts its ratio, or nothing where that is not within `low` ... `high`
    geometric   masking of turns: all of one counts, or nothing where the geometric mean of its ratios is not within
                `low` ... `high`

The factor multiplies the policy loss and carries no gradient. Metrics, under training/off_policy/:

    ratio    mean of the tokens' ratios: 1 where learner and engine agree
    chi2     mean of their squares minus 1: n tokens teach about as much as n / (1 + chi2) of the learner's own
    cut      share of the tokens whose factor was cut or set to 0
"""

from __future__ import annotations

from typing import Literal

from strop.algorithms.base import EntryTensors, Tensor
from strop.algorithms.losses import LIMIT, sum_over_turns

Correction = Literal["none", "token", "sequence", "icepop", "geometric"]


def correct(
    kind: Correction, proximal: Tensor, entries: EntryTensors, *, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """A factor per entry, and per-entry metrics."""
    behaviour = entries.behaviour
    # A NaN compares as out of bounds: a mask would leave such a token out, and nobody would know.
    assert bool(behaviour.isfinite().all()), "a sampled token has no logprob of the engine's: its turn must not train"
    difference = proximal.detach() - behaviour
    ratio = difference.clamp(-LIMIT, LIMIT).exp()
    match kind:
        case "none":
            factor, cut = ratio.new_ones(len(ratio)), ratio.new_zeros(len(ratio))
        case "token":
            factor, cut = ratio.clamp(max=high), ratio > high
        case "sequence":
            product = sum_over_turns(difference, entries.turn)[0].clamp(-LIMIT, LIMIT).exp()
            factor, cut = product.clamp(max=high), product > high
        case "icepop":
            cut = (ratio < low) | (ratio > high)
            factor = ratio.masked_fill(cut, 0.0)
        case "geometric":
            sums, sizes = sum_over_turns(difference, entries.turn)
            mean = (sums / sizes).clamp(-LIMIT, LIMIT).exp()
            cut = (mean < low) | (mean > high)
            factor = (~cut).to(ratio.dtype)
    metrics = {"ratio": ratio, "chi2": ratio * ratio - 1.0, "cut": cut.to(ratio.dtype)}
    return factor, {f"training/off_policy/{name}": column for name, column in metrics.items()}
