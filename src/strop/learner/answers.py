"""Logprobs of answers that somebody else sampled, under weights that are held here: how a teacher reads a student.

They are laid out and read as a batch is (logprobs.py), so that what is said of one model by two of its copies is the
same number. Left out: smaller pieces where a GPU's memory does not hold a micro-batch; without gradients it needs a
fraction of what an update of as many tokens does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.engines.base import GivenAnswer
from strop.learner.blocks import PLAIN, Way
from strop.learner.logprobs import compute_logprobs
from strop.trajectory import Batch, Entries, MicroBatch, Sample, assemble, check, pack
from strop.types import Rollout, Sampling, Task, Turn


@torch.no_grad()
def score_answers(
    read: Callable[[MicroBatch, Entries], Tensor], answers: Sequence[GivenAnswer], budget: int
) -> list[list[float]]:
    """One logprob for every response token of each answer, in micro-batches of `budget` tokens, or as many as the
    longest answer has with its prompt. `read` gives those of a micro-batch's entries."""
    if not answers:
        return []
    longest = max(len(answer.ids) for answer in answers)
    batch = lay_out(answers, longest)
    pieces = pack(batch, max(budget, longest))
    check(pieces, batch)
    found = np.empty(len(batch.entries))
    for piece in pieces:
        found[piece.entry] = read(piece, batch.entries).cpu().double().numpy()
    return [found[batch.rows(k)].tolist() for k in range(len(answers))]


def read_with(model: PreTrainedModel, way: Way = PLAIN) -> Callable[[MicroBatch, Entries], Tensor]:
    """How a model that is whole reads entries."""
    return lambda piece, entries: compute_logprobs(model, piece, entries, way=way)[0]


def lay_out(answers: Sequence[GivenAnswer], longest: int) -> Batch:
    """Answers as the turns of one rollout, in their order."""
    turns = [
        Turn(
            id=str(k),
            rollout="",
            attempt=1,
            prompt_ids=answer.prompt_ids,
            response_ids=answer.response_ids,
            logprobs=[0.0] * len(answer.response_ids),
            versions=[],
            sampling=Sampling(temperature=answer.temperature),
            finish="stop",
            started=k,
            ended=k,
        )
        for k, answer in enumerate(answers)
    ]
    assert all(turn.response_ids for turn in turns), "an answer without tokens has nothing to score"
    rollout = Rollout(id="", group="", member=0, task=Task(id=""), status="succeeded", created=0.0)
    return assemble([Sample(rollout, turns)], agents=("main",), budget=longest)
