"""What an update measures: losses and means of entries, and how far engine and learner are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strop.learner.ranks import ALONE, Ranks
from strop.trajectory import Batch, MicroBatch
from strop.trajectory.batch import Floats, Ints


class UpdateMeter:
    """What an update measured: parts of the loss (`*_loss`) as they are summed, weighted means of what else entries
    have, the last or largest of the rest."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = {}
        self.weight: Tensor | float = 0.0
        self.values: dict[str, float] = {}
        self.tokens = self.unique = 0

    def add(self, per_entry: dict[str, Tensor], weight: Tensor) -> None:
        self.weight += weight.sum(dtype=torch.float64)
        for name, column in per_entry.items():
            self.sums[name] = self.sums.get(name, 0.0) + (weight * column).sum().double()

    def last(self, name: str, value: float) -> None:
        self.values[name] = value

    def most(self, name: str, value: float) -> None:
        self.values[name] = max(value, self.values.get(name, value))

    def laid_out(self, batch: Batch, turns: Ints, pieces: Sequence[MicroBatch]) -> None:
        self.tokens += sum(len(batch.paths[t]) for t in turns)
        self.unique += sum(len(piece.ids) for piece in pieces)

    def metrics(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Of all ranks together."""
        sums = ranks.sum_dicts({name: float(total) for name, total in self.sums.items()} | {"": float(self.weight)})
        weight = sums.pop("")
        means = {
            n: total if n.endswith("_loss") else total / weight if weight else math.nan for n, total in sums.items()
        }
        tokens = {"perf/total_num_tokens": self.tokens, "tree/tokens": self.tokens, "tree/unique_tokens": self.unique}
        return means | self.values | {name: float(n) for name, n in tokens.items()}


def measure_mismatch(batch: Batch, now: Floats, limit: float) -> dict[str, float]:
    """How far engine and learner are apart on every token whose recorded logprob is exact."""
    exact = batch.entries.exact
    ours, theirs = now[exact], batch.entries.behaviour[exact]
    if not len(ours):
        return {}
    logs, probs = np.abs(ours - theirs), np.abs(np.exp(ours) - np.exp(theirs))
    return {
        "training/rollout_logprobs_diff_mean": float(logs.mean()),
        "training/rollout_logprobs_diff_max": float(logs.max()),
        "training/rollout_logprobs_diff_p99": float(np.quantile(logs, 0.99)),
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
        "training/rollout_logprobs_checked": float(len(ours)),
        "training/rollout_logprobs_off": float((~(logs <= limit)).sum()),
    }
