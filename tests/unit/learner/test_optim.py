import math

import pytest
import torch
from torch import nn

from strop.algorithms import make
from strop.config import LearnerConfig, OptimConfig, load
from strop.errors import LearnerError
from strop.learner.model import choose_way, place
from strop.learner.optim import Optim
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.trajectory import assemble


def rates(count, *, whole=0, **config):
    layer = nn.Linear(2, 2)
    optim = Optim(layer, OptimConfig(lr=1.0, **config), whole=whole)
    found = []
    for _ in range(count):
        found.append(optim.lr)
        layer(torch.ones(1, 2)).sum().backward()
        optim.clip()
        optim.step()
    return found


def test_schedules():
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(4, warmup=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(5, decay=4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(3, decay=4, schedule="constant") == [1.0, 1.0, 1.0]
    cosine = [0.5 + 0.5 * math.cos(math.pi * k / 4) for k in range(5)]
    assert rates(6, decay=4, schedule="cosine") == pytest.approx([*cosine, 0.0], abs=1e-12)
    assert rates(2, decay=4, warmup=2, schedule="cosine") == pytest.approx([0.5, cosine[1]])


def test_a_schedule_without_a_length_falls_over_the_whole_run():
    """Chosen by name it must not be constant in silence."""
    assert rates(5, schedule="linear", whole=4) == rates(5, schedule="linear", decay=4)
    assert rates(5, schedule="cosine", whole=4) == rates(5, schedule="cosine", decay=4)
    assert rates(3, schedule="cosine", whole=9, decay=2)[-1] == 0.0
    assert rates(3, whole=4) == [1.0, 1.0, 1.0]  # none chosen


def test_it_is_adamw_with_decay_for_matrices_only():
    """Written out, in fp64."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    optim = Optim(layer, OptimConfig(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), grad_clip=1e9))
    moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in (("w", weight), ("b", bias))}
    for step in range(1, 4):
        x = torch.randn(4, 3, dtype=torch.float64)
        layer(x).pow(2).sum().backward()
        for name, value, grad, decay in (("w", weight, layer.weight.grad, 0.5), ("b", bias, layer.bias.grad, 0.0)):
            mean, square = moments[name]
            mean.mul_(0.8).add_(0.2 * grad)
            square.mul_(0.9).add_(0.1 * grad**2)
            value.mul_(1 - 0.1 * decay)
            value.sub_(0.1 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-8))
        optim.clip()
        optim.step()
        assert torch.allclose(layer.weight, weight, atol=1e-12)
        assert torch.allclose(layer.bias, bias, atol=1e-12)


def test_large_gradients_are_scaled_to_the_clip():
    layer = nn.Linear(1, 1, bias=False)
    optim = Optim(layer, OptimConfig(lr=1.0, grad_clip=0.5))
    seen = []
    optim.adam.register_step_pre_hook(lambda *_: seen.append(layer.weight.grad.item()))
    (layer(torch.ones(1, 1)) * 100).sum().backward()
    assert float(optim.clip()) == pytest.approx(100.0)
    optim.step()
    assert seen[0] == pytest.approx(0.5, rel=1e-5)
    assert layer.weight.grad is None


def test_where_and_in_what_it_computes():
    there = torch.cuda.is_available()
    device, dtype = place(LearnerConfig())
    assert (device.type, dtype) == (("cuda", torch.bfloat16) if there else ("cpu", torch.float32))
    assert place(LearnerConfig(device="cpu")) == (torch.device("cpu"), torch.float32)
    assert place(LearnerConfig(device="cpu", dtype="bfloat16"))[1] == torch.bfloat16
    assert choose_way(LearnerConfig(), torch.device("cuda")).attention == "flex"
    assert choose_way(LearnerConfig(), torch.device("cpu")).attention == "blocks"
    assert choose_way(LearnerConfig(attention="blocks"), torch.device("cuda")).attention == "blocks"
    with pytest.raises(LearnerError, match="GPUs only"):
        choose_way(LearnerConfig(attention="flex"), torch.device("cpu"))
    if not there:
        with pytest.raises(LearnerError, match="finds no GPU"):
            place(LearnerConfig(device="cuda"))


async def test_the_learner_of_a_run_knows_how_many_steps_it_has(folder, episodes, tmp_path):
    given = {
        "device": "cpu",
        "minibatches": 2,
        "optim": {"lr": 1e-3, "schedule": "cosine"},
        "critic": {"schedule": "linear"},
    }
    config = load(learner=given, loop={"steps": 3})
    batch = assemble(episodes(), agents=["main"], budget=1000)
    process = LearnerProcess(tmp_path / "learner.log")
    try:
        await process.start(LearnerSettings.of(config, folder, serve=False))
        batch.entries, _ = await process.of().score(batch.bare())
        make(config.algorithm, config.learner).assign_credit(batch)
        rates = [(await process.of().update(batch.bare()))["actor/lr"] for _ in range(4)]
    finally:
        await process.close()
    last_of_each = [1e-3 * (0.5 + 0.5 * math.cos(math.pi * k / 6)) for k in (1, 3, 5)]
    assert rates == pytest.approx([*last_of_each, 0.0])
