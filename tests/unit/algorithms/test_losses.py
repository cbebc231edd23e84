import math
import re
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms import EntryTensors, make
from strop.algorithms.losses import Loss, compute_policy_loss, sum_over_turns
from strop.config import AlgorithmConfig, LearnerConfig
from strop.errors import ConfigError
from strop.trajectory import Sample, assemble, pack
from strop.types import Rollout, Task, Turn

KINDS = get_args(Loss)
LIMITS = {"low": 0.2, "high": 0.3, "dual": 3.0}

numbers = st.floats(-2.0, 2.0, allow_subnormal=False)
turns = st.lists(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=4), min_size=1, max_size=4)


def view(**columns):
    return EntryTensors(**(dict.fromkeys(field.name for field in fields(EntryTensors)) | columns))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def run(kind, log_ratio, advantage, turn=None, proximal=None):
    """Losses, their gradients and the metrics; the proximal policy's logprobs are -1 unless given."""
    before = tensor(proximal or [-1.0] * len(log_ratio))
    logp = (before + tensor(log_ratio)).requires_grad_()
    entries = view(advantage=tensor(advantage), turn=torch.tensor(turn or range(len(log_ratio))))
    loss, metrics = compute_policy_loss(kind, logp, before, entries, **LIMITS)
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    return loss.detach(), grad, metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "trains"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 1.0, -1.3, False),  # gone far enough up: bounded at 1 + high
        (0.5, 1.0, -0.5, True),  # gone the wrong way: pulled back
        (0.5, -1.0, 0.8, False),  # gone far enough down: bounded at 1 - low
        (1.5, -1.0, 1.5, True),
    ],
)
def test_clip(ratio, advantage, expected, trains):
    loss, grad, metrics = run("clip", [math.log(ratio)], [advantage])
    assert loss.item() == pytest.approx(expected)
    assert grad.item() == pytest.approx(-ratio * advantage if trains else 0.0)
    assert metrics["actor/pg_loss"].item() == loss.item()
    assert metrics["actor/pg_clipfrac"].item() == (not trains)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "grad", "lower"),
    [
        (5.0, -2.0, 6.0, 0.0, 1.0),  # 10 without the bound: 3 x 2 with it
        (2.0, -2.0, 4.0, 4.0, 0.0),
        (0.5, -2.0, 1.6, 0.0, 0.0),
        (5.0, 2.0, -2.6, 0.0, 0.0),  # a positive advantage is bounded by the clip already
        (1.1, 2.0, -2.2, -2.2, 0.0),
    ],
)
def test_dual_clip_bounds_what_a_large_ratio_costs(ratio, advantage, expected, grad, lower):
    loss, got, metrics = run("dual_clip", [math.log(ratio)], [advantage])
    assert loss.item() == pytest.approx(expected)
    assert got.item() == pytest.approx(grad)
    assert metrics["actor/pg_clipfrac_lower"].item() == lower


def test_gspo_has_one_ratio_for_a_turn():
    # Turn 7 has the log ratios 0.4 and -0.2: the mean is 0.1. Turn 3 stands alone at log 1.5, past the bound.
    loss, grad, metrics = run("gspo", [0.4, math.log(1.5), -0.2], [1.0, 1.0, 2.0], turn=[7, 3, 7])
    s = math.exp(0.1)
    assert loss.tolist() == pytest.approx([-s, -1.3, -2 * s])
    assert grad.tolist() == pytest.approx([-s, 0.0, -2 * s])
    assert metrics["actor/pg_clipfrac"].tolist() == [0.0, 1.0, 0.0]
    assert metrics["actor/ppo_kl"].tolist() == pytest.approx([-0.4, -math.log(1.5), 0.2])


@given(turns)
@settings(max_examples=50, deadline=None)
def test_gspo_averaged_over_a_turn_has_the_gradient_of_the_sequence_objective(made):
    advantage, expected = [], 0.0
    logp = tensor([now for turn in made for now, _, _ in turn]).requires_grad_()
    before = tensor([then for turn in made for _, then, _ in turn])
    which = torch.tensor([k for k, turn in enumerate(made) for _ in turn])
    for k, turn in enumerate(made):
        own, a = which == k, turn[0][2]
        s = (logp[own] - before[own]).mean().exp()
        expected = expected - torch.minimum(s * a, s.clamp(0.8, 1.3) * a)
        advantage += [a] * len(turn)
    weight = tensor([1 / len(turn) for turn in made for _ in turn])
    loss, _ = compute_policy_loss("gspo", logp, before, view(advantage=tensor(advantage), turn=which), **LIMITS)
    got = (weight * loss).sum()
    assert got.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    ours, theirs = torch.autograd.grad(got, logp)[0], torch.autograd.grad(expected, logp)[0]
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_gspo_on_turns_of_one_token_is_clip(pairs):
    ratios, advantages = [r for r, _ in pairs], [a for _, a in pairs]
    for one, other in zip(run("gspo", ratios, advantages)[:2], run("clip", ratios, advantages)[:2], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("ratio", "held", "clipped"), [(1.1, 1.1, 0.0), (1.5, 1.3, 1.0), (0.5, 0.8, 1.0)])
def test_cispo_keeps_every_tokens_gradient(ratio, held, clipped):
    loss, grad, metrics = run("cispo", [math.log(ratio)], [2.0])
    assert loss.item() == pytest.approx(-held * 2.0 * (math.log(ratio) - 1.0))
    assert grad.item() == pytest.approx(-held * 2.0)
    assert metrics["actor/pg_clipfrac"].item() == clipped


@given(turns)
@settings(max_examples=50, deadline=None)
def test_where_nothing_moved_all_have_the_gradient_of_the_plain_policy_gradient(made):
    before = [then for turn in made for _, then, _ in turn]
    advantage = [a for turn in made for _, _, a in turn]
    which = [k for k, turn in enumerate(made) for _ in turn]
    for kind in KINDS:
        _, grad, metrics = run(kind, [0.0] * len(before), advantage, which, before)
        assert grad.tolist() == pytest.approx([-a for a in advantage], rel=1e-12), kind
        assert not metrics["actor/pg_clipfrac"].any()
        assert not metrics["actor/ppo_kl"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [-1000.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_one_odd_token_does_not_make_the_loss_infinite(kind, far, advantage):
    logp = torch.tensor([far], dtype=torch.float32, requires_grad=True)
    entries = view(advantage=torch.tensor([advantage]), turn=torch.tensor([0]))
    loss, metrics = compute_policy_loss(kind, logp, torch.zeros(1), entries, **LIMITS)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad.isfinite().all()
    assert abs(metrics["actor/ppo_kl"].item()) == 20.0


def test_sums_over_turns_in_any_order():
    sums, sizes = sum_over_turns(tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([9, 2, 9, 9]))
    assert (sums.tolist(), sizes.tolist()) == ([8.0, 2.0, 8.0, 8.0], [3.0, 1.0, 3.0, 3.0])


@pytest.mark.parametrize("budget", [12, 20, 1000])
def test_packing_cannot_change_a_loss(budget):
    rng, samples = np.random.default_rng(0), []
    for m in range(4):
        id, context, made = f"g.{m}", [1, 2, 3], []
        for k in range(3):
            response = rng.integers(3, 6, size=rng.integers(1, 3)).tolist()
            made.append(
                Turn(
                    id=f"{id}/1/{k}", rollout=id, attempt=1, prompt_ids=context, response_ids=response, finish="stop",
                    logprobs=[-1.0] * len(response), versions=[(0, "1.0")], started=float(k), ended=k + 0.5,
                )
            )  # fmt: skip
            context = context + response + [9]
        rollout = Rollout(id=id, group="g", member=m, task=Task(id="t"), status="succeeded", created=0.0)
        samples.append(Sample(rollout, made))
    batch = assemble(samples, agents=["main"], budget=budget)
    pieces = pack(batch, budget)
    assert (len(pieces) > 1) == (budget < 1000)
    count = len(batch.entries)
    logp, before, advantage = (torch.from_numpy(rng.normal(size=count)) for _ in range(3))
    turn = torch.from_numpy(batch.entries.turn)
    for kind in KINDS:
        whole, _ = compute_policy_loss(kind, logp, before, view(advantage=advantage, turn=turn), **LIMITS)
        seen = 0
        for piece in pieces:
            rows = torch.from_numpy(piece.entry)
            entries = view(advantage=advantage[rows], turn=turn[rows])
            part, _ = compute_policy_loss(kind, logp[rows], before[rows], entries, **LIMITS)
            assert torch.equal(part, whole[rows])
            seen += len(rows)
        assert seen == count


@pytest.mark.parametrize("part", ["losses", "aggregate", "kl", "correction", "filters", "credit", "base", "nothing"])
def test_a_part_is_no_algorithm(part):
    with pytest.raises(ConfigError) as refused:
        make(AlgorithmConfig(name=part), LearnerConfig())
    known = re.findall(r"\w+", str(refused.value).partition(" Fix: ")[2])
    assert "grpo" in known
    assert not {"losses", "aggregate", "kl", "correction", "filters", "credit", "base", "policy_gradient"} & set(known)


def test_an_algorithm_that_remembers_nothing_can_be_resumed():
    make(AlgorithmConfig(), LearnerConfig()).resume({"actor/pg_loss": 1.0})
