"""Passes that a GPU really recorded: the gradients and logprobs of passes that were launched one by one."""

from __future__ import annotations

import copy

import pytest
import torch

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.learner.learner import Learner
from tests.unit.learner.practice import credited, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("default::UserWarning"),  # the compiler's own
]


def taught_on_gpu(folder, budget=20000):
    config = LearnerConfig(token_budget=budget, optim=OptimConfig(lr=1e-3, grad_clip=1e9), device="cuda")
    return Learner(folder, config, make(AlgorithmConfig(), config))


def norm(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).norm()


@pytest.mark.parametrize("budget", [20000, 60])
def test_recorded_gradients_are_those_of_plain_passes(folder, episodes, budget):
    taught = taught_on_gpu(folder, budget)
    for seed in range(3):  # other trees are played by the same recording
        batch = credited(taught, episodes(seed=seed))
        graphs, taught.graphs = taught.graphs, None
        plain, wanted = gradients(taught, copy.deepcopy(batch))
        taught.graphs = graphs
        found, metrics = gradients(taught, copy.deepcopy(batch))
        assert graphs._too_large > 0
        assert len(graphs._recorded) == 1
        assert norm([found[name] - plain[name] for name in plain]) < 0.05 * norm(plain.values())
        assert metrics["actor/entropy"] == pytest.approx(wanted["actor/entropy"], rel=1e-2)


def test_recordings_follow_weights_that_change_and_that_move(folder, episodes):
    recorded, plain = taught_on_gpu(folder), taught_on_gpu(folder)
    plain.graphs = None
    for seed in range(4):
        if seed == 2:
            for parameter in recorded.model.parameters():
                parameter.data = parameter.data.clone()
        batches = [credited(taught, episodes(seed=seed)) for taught in (recorded, plain)]
        ours, theirs = (taught.update(batch) for taught, batch in zip((recorded, plain), batches, strict=True))
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=0.05)
    assert recorded.graphs._recorded
    apart = [recorded.optim.weights()[name] - weight for name, weight in plain.optim.weights().items()]
    assert norm(apart) < 0.05 * norm(plain.optim.weights().values())
