"""Masks of a batch: found once, and refused where no engine can have drawn what they are of."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from strop.algorithms.filters import skip_turns
from strop.errors import LearnerError
from strop.learner.masks import EntryMasks
from strop.trajectory import Batch, Sample, assemble
from strop.types import Rollout, Task, Turn
from tests.parity.test_grammars import make_turn, make_turns
from tests.unit.learner.practice import learner
from tests.unit.models.test_grammar import MANY, NANO, USUAL, VOCABULARY, WIDE

CPU = torch.device("cpu")


def make_batch(turns: list[Turn]) -> Batch:
    samples = [
        Sample(Rollout(id=one.rollout, group="g", member=n, task=Task(id="t"), status="succeeded", created=0.0), [one])
        for n, one in enumerate(turns)
    ]
    return assemble(samples, agents=["main"], budget=500)


def test_a_batch_that_is_scored_and_then_trained_on_has_its_masks_found_once() -> None:
    turns, _ = make_turns()
    first = EntryMasks.of(make_batch(turns).bare(), NANO, VOCABULARY)
    assert first is not None
    assert EntryMasks.of(make_batch(turns).bare(), NANO, VOCABULARY, first) is first
    others = [turns[1], turns[0], *turns[2:]]
    assert EntryMasks.of(make_batch(others).bare(), NANO, VOCABULARY, first) is not first
    unheld = replace(turns[0], sampling=replace(turns[0].sampling, grammar=None))
    assert EntryMasks.of(make_batch([unheld, *turns[1:]]).bare(), NANO, VOCABULARY, first) is not first
    assert EntryMasks.of(make_batch([unheld]).bare(), NANO, VOCABULARY, first) is None


def test_a_token_that_cannot_have_been_drawn_is_refused_with_its_turn() -> None:
    turns, _ = make_turns()
    turns[0].response_ids[0] = turns[0].response_ids[-1]
    with pytest.raises(LearnerError, match=rf"turn {turns[0].id} is not one .*not one that the grammar allows"):
        EntryMasks.of(make_batch(turns).bare(), NANO, VOCABULARY)


def make_wide(number: int, ids: list[int]) -> Turn:
    turn = make_turn(number, ids, "words", 1.0)
    return replace(turn, sampling=replace(turn.sampling, grammar=WIDE))


def test_a_turn_whose_grammar_cannot_be_followed_is_left_out_and_no_other() -> None:
    turns = [make_wide(0, USUAL), make_wide(1, MANY), make_wide(2, USUAL), make_turns()[0][0]]
    batch = make_batch([replace(turn, id=f"g.{n}/1/0", rollout=f"g.{n}") for n, turn in enumerate(turns)])
    alone = EntryMasks.of(make_batch(turns[:1]).bare(), NANO, VOCABULARY)
    learnt = learner(NANO, dtype=torch.float32)
    with pytest.raises(LearnerError, match=r"turn g.1/1/0 is held to a grammar that cannot be followed.* Fix: "):
        learnt.update(batch)
    assert learnt.find_masks(batch) == [1]
    skip_turns(batch, [1], "grammar_limit")
    masks = learnt._masks
    assert learnt.find_masks(batch) == [1]
    assert learnt._masks is masks, "they were found before"
    assert not batch.entries.exact[batch.rows(1)].any()
    assert batch.entries.exact[batch.rows(0)].all()
    assert (masks is None) is (alone is None) is False
    for t in (0, 2):
        theirs = alone.take(np.arange(len(USUAL)), CPU)  # pyright: ignore
        assert torch.equal(masks.take(batch.rows(t), CPU), theirs)  # pyright: ignore
    assert masks.take(batch.rows(1), CPU) is None  # pyright: ignore
    assert batch.counts()["filter_tokens/grammar_limit"] == len(MANY)
    learnt.update(batch)


def test_turns_that_carry_no_loss_have_no_masks() -> None:
    turns, _ = make_turns()
    turns[0] = replace(turns[0], finish="abandoned", response_ids=turns[0].response_ids[::-1])
    masks = EntryMasks.of(make_batch(turns).bare(), NANO, VOCABULARY)
    assert masks is not None, "what was abandoned is not even looked at"
    assert EntryMasks.of(make_batch(turns[:1]).bare(), NANO, VOCABULARY) is None
