"""What became of every sampled token: it was trained, or it was not and there is one reason. The sums agree.

    batches after credit ──count_tokens──▶ rollout → turn → {"trained": 75} or {"excluded:title": 9}

A turn that its rollout's reason and one of its own leave out is counted under its own. Tokens of a trained turn that
the algorithm gave no weight are `no_loss`. What an importance-sampling correction masks while the learner works is not
known here: such tokens count as trained (`training/off_policy/cut`). What an algorithm of one's own gives weight that
it should not is told as it is: as trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from strop.trajectory.batch import Batch, Sample
from strop.types import TRAINED, TokenCounts, Turn


def count_tokens(samples: Sequence[Sample], batches: Mapping[str, Batch]) -> dict[str, TokenCounts]:
    """By rollout. `batches` are those of the step's policies, by name, after credit. Turns without tokens are not in
    it."""
    learnt = {turn: counts for batch in batches.values() for turn, counts in _count_batch(batch).items()}
    counted: dict[str, TokenCounts] = {}
    for sample in samples:
        sampled = [turn for turn in sample.turns if turn.response_ids]
        counted[sample.rollout.id] = {turn.id: learnt.get(turn.id) or _count_others(turn, batches) for turn in sampled}
        for turn in sampled:
            counts = counted[sample.rollout.id][turn.id]
            assert sum(counts.values()) == len(turn.response_ids), f"turn {turn.id} is counted as {counts}"
    return counted


def sum_tokens(turns: Iterable[Mapping[str, int]]) -> Counter[str]:
    """What became of the tokens of several turns together."""
    total: Counter[str] = Counter()
    for counts in turns:
        total.update(counts)
    return total


def describe_tokens(counted: Mapping[str, TokenCounts]) -> dict[str, float]:
    """The same for a whole step, as metrics.

    >>> describe_tokens({"g1.0": {"g1.0/1/0": {"trained": 75}, "g1.0/1/1": {"excluded:title": 9}}})
    {'tokens/sampled': 84.0, 'tokens/trained': 75.0, 'tokens/left_out/excluded:title': 9.0}
    """
    total = sum_tokens(turn for turns in counted.values() for turn in turns.values())
    trained = total.pop(TRAINED, 0)
    reasons = {f"tokens/left_out/{reason}": float(count) for reason, count in sorted(total.items())}
    return {"tokens/sampled": float(trained + sum(total.values())), "tokens/trained": float(trained), **reasons}


def _count_batch(batch: Batch) -> TokenCounts:
    weighted = np.bincount(batch.entries.turn[batch.entries.weight > 0], minlength=len(batch.turns))
    sizes = np.diff(batch.starts)
    counted: TokenCounts = {}
    for turn, size, trained, skipped in zip(batch.turns, sizes, weighted, batch.skipped, strict=True):
        reason = skipped or batch.dropped.get(turn.rollout) or "no_loss"
        left = {reason: int(size - trained)} if size > trained else {}
        counted[turn.id] = ({TRAINED: int(trained)} if trained else {}) | left
    return counted


def _count_others(turn: Turn, batches: Mapping[str, Batch]) -> dict[str, int]:
    """Of a turn that is in no batch: its agent is not trained, or its whole rollout is left out."""
    batch = batches.get(turn.policy)
    ours = batch is not None and turn.agent in batch.agents
    reason = batch.dropped.get(turn.rollout) if batch is not None and ours else None
    return {reason or "untrained": len(turn.response_ids)}
