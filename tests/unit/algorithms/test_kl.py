import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop import algorithms
from strop.algorithms.kl import AdaptiveCoefficient, Estimator, estimate, penalise_rewards
from strop.algorithms.rewards import Rewards
from strop.config import AlgorithmConfig, LearnerConfig
from strop.trajectory import Sample, assemble
from strop.types import Reward, Rollout, Task, Turn
from tests.unit.algorithms.rollouts import batch_of, sample, turn

KINDS = get_args(Estimator)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "near", "far"),
    [
        ("k1", 0.5, -3.0),
        ("k2", 0.125, 4.5),
        ("abs", 0.5, 3.0),
        ("k3", math.exp(-0.5) - 0.5, math.exp(3.0) - 4.0),
        ("low_var", math.exp(-0.5) - 0.5, 10.0),
    ],
)
def test_estimates(kind, near, far):
    """Of a token that the policy finds likelier than the reference does by 0.5, and less likely by 3."""
    assert estimate(kind, tensor([-1.0, -4.0]), tensor([-1.5, -1.0])).tolist() == pytest.approx([near, far])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [-1000.0, 1000.0])
def test_one_odd_token_does_not_make_it_infinite(kind, far):
    logp = torch.tensor([far], dtype=torch.float32, requires_grad=True)
    distance = estimate(kind, logp, torch.zeros(1))
    distance.sum().backward()
    assert distance.isfinite().all()
    assert logp.grad.isfinite().all()


logits = st.lists(st.floats(-2, 2), min_size=3, max_size=3)


@given(logits, logits)
@settings(max_examples=50, deadline=None)
def test_values_and_gradients_are_those_of_the_divergence(ours, theirs):
    """In expectation over a policy of three tokens, worked out and not sampled."""
    policy = tensor(ours).requires_grad_()
    logp, ref = policy.log_softmax(0), tensor(theirs).log_softmax(0)
    p = logp.exp().detach()
    to_ref = (logp.exp() * (logp - ref)).sum()
    from_ref = (ref.exp() * (ref - logp)).sum()
    for kind in ("k1", "k3"):
        assert (p * estimate(kind, logp, ref)).sum().item() == pytest.approx(to_ref.item(), abs=1e-12)

    def grad(value):
        return torch.autograd.grad(value, policy, retain_graph=True)[0].tolist()

    assert grad((p * estimate("k1", logp, ref)).sum()) == pytest.approx([0.0] * 3, abs=1e-12)
    assert grad((p * estimate("k2", logp, ref)).sum()) == pytest.approx(grad(to_ref), abs=1e-12)
    assert grad((p * estimate("k3", logp, ref)).sum()) == pytest.approx(grad(from_ref), abs=1e-12)


# -- in the reward -----------------------------------------------------------------------------------------------------


def make(*rollouts):
    """A batch of rollouts, each a list of turns (length, choices, finish); rewards are 1, 0, 1, 0, ..."""
    samples = []
    for m, turns in enumerate(rollouts):
        id = f"g.{m}"
        made = [
            Turn(
                id=f"{id}/1/{k}", rollout=id, attempt=1, prompt_ids=[1, 2], response_ids=[3 + k] * length,
                logprobs=[-1.0] * length, versions=[(0, "1.0")], finish=finish, choices=choices,
                started=float(k), ended=k + 0.5,
            )
            for k, (length, choices, finish) in enumerate(turns)
        ]  # fmt: skip
        rollout = Rollout(
            id=id, group="g", member=m, task=Task(id="t"), status="succeeded", created=0.0,
            rewards=(Reward(value=float(m % 2 == 0)),),
        )  # fmt: skip
        samples.append(Sample(rollout, made))
    batch = assemble(samples, agents=["main"], budget=1000)
    batch.entries.proximal[:], batch.entries.ref[:] = -1.0, -1.0
    return batch


def test_penalties_lie_on_the_tokens_they_are_for():
    batch = make([(2, 1, "stop"), (1, 1, "abandoned")], [(1, 2, "stop"), (1, 2, "stop")])
    batch.entries.ref[:] = [-2.0, -1.5, -9.0, -3.0, -1.0]
    rewards = Rewards.of(batch, {"reward": 1.0})
    distance = penalise_rewards(batch, rewards, "k1", 0.1)
    # The third token is not trained; the last two are choices of one request.
    assert rewards.tokens.tolist() == pytest.approx([-0.1, -0.05, 0.0, -0.1, 0.0])
    assert rewards.totals.tolist() == [1.0, 0.0]
    assert rewards.outcomes(batch).tolist() == pytest.approx([1.0 - 0.15, -0.1])
    assert distance == pytest.approx(((1.0 + 0.5) / 2 + (2.0 + 0.0) / 2) / 2)  # the mean over rollouts of their means


def test_penalties_add_to_what_tokens_have_already():
    batch = make([(2, 1, "stop")])
    batch.entries.ref[:] = -2.0
    rewards = Rewards.of(batch, {"reward": 1.0})
    for _ in range(2):
        penalise_rewards(batch, rewards, "k1", 0.25)
    assert rewards.tokens.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_and_losses_use_the_same_estimate(kind):
    batch = make([(6, 1, "stop")])
    rng = np.random.default_rng(0)
    batch.entries.proximal[:], batch.entries.ref[:] = -rng.exponential(2.0, 6), -rng.exponential(2.0, 6)
    batch.entries.ref[0] = -100.0
    rewards = Rewards.of(batch, {"reward": 1.0})
    distance = penalise_rewards(batch, rewards, kind, 1.0)
    expected = estimate(kind, torch.from_numpy(batch.entries.proximal), torch.from_numpy(batch.entries.ref))
    assert (-rewards.tokens).tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    assert distance == pytest.approx(expected.mean().item())


@pytest.mark.parametrize("column", ["proximal", "ref"])
def test_a_token_that_was_not_scored_is_our_own_bug(column):
    batch = make([(2, 1, "stop")], [(1, 1, "stop"), (2, 1, "stop")])
    getattr(batch.entries, column)[4] = np.nan
    rewards = Rewards.of(batch, {"reward": 1.0})
    with pytest.raises(AssertionError, match=f"turn g.1/1/1 has no {column} logprobs: score the batch"):
        penalise_rewards(batch, rewards, "k3", 0.1)


def test_without_a_trained_token_there_is_no_distance():
    batch = make([(2, 1, "abandoned")])
    batch.entries.ref[:] = -2.0
    rewards = Rewards.of(batch, {"reward": 1.0})
    assert penalise_rewards(batch, rewards, "k1", 0.1) == 0.0
    assert not rewards.tokens.any()


def test_the_coefficient_follows_its_target():
    kl = AdaptiveCoefficient(0.1, target=2.0, horizon=100)
    kl.follow(3.0, rollouts=50)  # half above the target: counts as a fifth
    assert kl.coef == pytest.approx(0.1 * 1.1)
    kl.follow(1.9, rollouts=100)
    assert kl.coef == pytest.approx(0.1 * 1.1 * 0.95)
    kl.follow(2.0, rollouts=100)
    assert kl.coef == pytest.approx(0.1 * 1.1 * 0.95)
    kl.follow(0.0, rollouts=100)
    assert kl.coef == pytest.approx(0.1 * 1.1 * 0.95 * 0.8)


def test_without_a_target_the_coefficient_is_fixed():
    kl = AdaptiveCoefficient(0.1, target=None, horizon=100)
    kl.follow(1000.0, rollouts=1000)
    assert kl.coef == 0.1


def test_a_resumed_run_goes_on_with_the_weight_that_the_last_step_left():
    config = AlgorithmConfig(name="grpo", settings={"kl": "reward", "kl_target": 0.01, "kl_coef": 0.5})
    one, other = (algorithms.make(config, LearnerConfig()) for _ in range(2))

    def scored(reward):
        batch = batch_of(sample(0, reward, turn(3)), sample(1, 0.0, turn(2)))
        batch.entries.proximal[:], batch.entries.ref[:] = -1.0, -1.7
        return batch

    metrics = one.assign_credit(scored(1.0))
    assert metrics["actor/kl_coef"] > 0.5
    other.resume(metrics)
    assert other.assign_credit(scored(2.0)) == one.assign_credit(scored(2.0))
