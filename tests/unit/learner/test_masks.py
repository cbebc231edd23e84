"""Masks of a batch: found once, and refused where no engine can have drawn what they are of."""

import pytest
from msgspec.structs import replace

from strop.errors import LearnerError
from strop.learner.masks import EntryMasks
from strop.trajectory import Batch, Sample, assemble
from strop.types import Rollout, Task, Turn
from tests.parity.test_grammars import make_turns
from tests.unit.models.test_grammar import NANO, VOCABULARY


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
