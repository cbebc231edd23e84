import math
from dataclasses import fields
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms import EntryTensors
from strop.algorithms.correction import Correction, correct
from strop.trajectory import Sample, assemble
from strop.types import Rollout, Task, Turn

KINDS = get_args(Correction)
RATIOS = [0.25, 1.0, 1.5, 4.0, 1.0]
TURN = [0, 0, 1, 1, 2]


def run(kind, ratios, turn, *, low=0.5, high=2.0, behaviour=None):
    told = torch.full((len(ratios),), -1.0, dtype=torch.float64) if behaviour is None else behaviour
    columns = dict.fromkeys(field.name for field in fields(EntryTensors)) | {
        "behaviour": told,
        "turn": torch.tensor(turn),
    }
    proximal = (told + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    factor, metrics = correct(kind, proximal, EntryTensors(**columns), low=low, high=high)
    assert not factor.requires_grad
    return factor.tolist(), {name.removeprefix("training/off_policy/"): m.tolist() for name, m in metrics.items()}


@pytest.mark.parametrize(
    ("kind", "factor", "cut"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0, 0]),
        ("token", [0.25, 1.0, 1.5, 2.0, 1.0], [0, 0, 0, 1, 0]),
        ("sequence", [0.25, 0.25, 2.0, 2.0, 1.0], [0, 0, 1, 1, 0]),  # 1.5 x 4 = 6
        ("icepop", [0.0, 1.0, 1.5, 0.0, 1.0], [1, 0, 0, 1, 0]),
        ("geometric", [1.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1, 0]),  # means 0.5, which is kept, 2.449 and 1
    ],
)
def test_factors(kind, factor, cut):
    got, metrics = run(kind, RATIOS, TURN, low=0.5 - 1e-12)
    assert got == pytest.approx(factor)
    assert metrics["cut"] == cut
    assert metrics["ratio"] == pytest.approx(RATIOS)
    assert metrics["chi2"] == pytest.approx([r * r - 1 for r in RATIOS])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_done_where_engine_and_learner_agree(kind):
    factor, metrics = run(kind, [1.0] * 5, TURN, low=1.0, high=1.0)
    assert factor == [1.0] * 5
    assert metrics == {"ratio": [1.0] * 5, "chi2": [0.0] * 5, "cut": [0.0] * 5}


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_on_turns_of_one_token_sequences_are_tokens(ratios):
    turns = list(range(len(ratios)))
    assert run("sequence", ratios, turns) == run("token", ratios, turns)
    assert run("geometric", ratios, turns)[1]["cut"] == run("icepop", ratios, turns)[1]["cut"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [-1000.0, 1000.0])
def test_one_odd_token_stays_finite(kind, far):
    told = torch.tensor([far, -1.0], dtype=torch.float32)
    columns = dict.fromkeys(field.name for field in fields(EntryTensors)) | {
        "behaviour": told,
        "turn": torch.tensor([0, 0]),
    }
    factor, metrics = correct(kind, torch.tensor([-1.0, -1.0]), EntryTensors(**columns), low=0.5, high=2.0)
    assert factor.isfinite().all()
    assert (factor <= 2.0).all()
    assert all(column.isfinite().all() for column in metrics.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_a_token_without_a_logprob_cannot_pass_silently(kind, odd):
    """A mask would leave it out, and a fallback would switch the correction off for the others."""
    with pytest.raises(AssertionError, match="no logprob of the engine's"):
        run(kind, [1.0, 1.0], [0, 1], behaviour=torch.tensor([-1.0, odd], dtype=torch.float64))


@pytest.mark.parametrize(
    ("logprobs", "said"), [([-1.0], "1 logprobs for 2 tokens"), ([-1.0, math.nan], "a logprob of nan")]
)
def test_a_turn_without_logprobs_never_gets_here(logprobs, said):
    turn = Turn(
        id="g.0/1/0", rollout="g.0", attempt=1, prompt_ids=[1], response_ids=[2, 3], logprobs=logprobs,
        versions=[(0, "1.0")], finish="stop", started=0.0, ended=1.0,
    )  # fmt: skip
    rollout = Rollout(id="g.0", group="g", member=0, task=Task(id="t"), status="succeeded", created=0.0)
    with pytest.raises(AssertionError, match=f"turn g.0/1/0 has {said}"):
        assemble([Sample(rollout, [turn])], agents=["main"], budget=100)
