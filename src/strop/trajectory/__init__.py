"""Turns become a token tree with entries: pure functions of records, numpy only.

    samples ──assemble──▶ Batch (entries, what was left out and why) ──pack──▶ pieces of the token tree
                                                                       check: every branch reads back as its turn

Left out for now: several policies in one batch (call `assemble` once per policy, with that policy's agents).
"""

from strop.trajectory.assemble import assemble
from strop.trajectory.batch import Batch, Entries, Sample, explain
from strop.trajectory.exactness import exactness
from strop.trajectory.token_tree import MicroBatch, check, pack

__all__ = ["Batch", "Entries", "MicroBatch", "Sample", "assemble", "check", "exactness", "explain", "pack"]
