import math

import pytest
import torch

from strop.algorithms.losses import clipped


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
def test_clipped(ratio, advantage, expected, trains):
    logp = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    proximal, advantages = torch.tensor([-1.0]).double(), torch.tensor([advantage]).double()
    loss, metrics = clipped(logp, proximal, advantages, 0.2, 0.3)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected)
    assert (logp.grad.item() != 0) == trains
    assert metrics["actor/pg_clipfrac"].item() == (not trains)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_unscored_means_the_policy_is_the_proximal_one():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = clipped(logp, torch.full((2,), math.nan), torch.tensor([1.0, -3.0]), 0.2, 0.2)
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 3.0]
    assert logp.grad.tolist() == [-1.0, 3.0]
    assert metrics["actor/ppo_kl"].tolist() == [0.0, 0.0]
