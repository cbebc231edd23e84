"""Turns become a token tree with entries: pure functions of records, numpy only.

    samples ──assemble──▶ Batch (entries, what was left out and why) ──pack──▶ pieces of the token tree
                                                                       check: every branch reads back as its turn

Left out for now: several policies in one batch (call `assemble` once per policy, with that policy's agents).
"""

from strop.trajectory.assemble import assemble
from strop.trajectory.batch import Batch, Entries, Sample, explain
from strop.trajectory.exactness import exactness
from strop.trajectory.token_tree import MicroBatch, check, pack
from strop.trajectory.tokens import count_tokens, describe_tokens, sum_tokens

__all__ = [
    "Batch",
    "Entries",
    "MicroBatch",
    "Sample",
    "assemble",
    "check",
    "count_tokens",
    "describe_tokens",
    "exactness",
    "explain",
    "pack",
    "sum_tokens",
]
