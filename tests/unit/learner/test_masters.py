"""bfloat16 in the passes, float32 behind it."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from strop.config import OptimConfig
from strop.errors import LearnerError
from strop.learner.masters import Masters, lower
from strop.learner.optim import Optim
from strop.trajectory import pack
from tests.unit.learner.practice import Critical, credited, gradients, learner


def test_many_small_micro_batches_are_not_lost():
    """After one gradient of 1, a thousand of 0.001 double the sum: in bfloat16 each of them would vanish."""
    layer = nn.Linear(1, 1, bias=False)
    masters = Masters(lower(layer, torch.bfloat16))
    plain = nn.Linear(1, 1, bias=False).bfloat16()
    wide = nn.Linear(1, 1, bias=False)
    for k in range(1001):
        push = torch.tensor([[1.0 if k == 0 else 0.001]])
        layer(push.bfloat16()).sum().backward()
        plain(push.bfloat16()).sum().backward()
        wide(push.bfloat16().float()).sum().backward()
        assert layer.weight.grad is None
    masters.take_gradients()
    (master,) = masters.of.values()
    assert master.grad.dtype == torch.float32
    assert master.grad.item() == pytest.approx(wide.weight.grad.item(), rel=1e-6)
    assert wide.weight.grad.item() == pytest.approx(2.0, rel=1e-2)
    assert plain.weight.grad.item() == 1.0


def test_updates_smaller_than_bfloat16_can_hold_add_up():
    layer = nn.Linear(4, 4)
    optim = Optim(layer, OptimConfig(lr=1e-4), lower(layer, torch.bfloat16))
    place, before = layer.weight.data_ptr(), layer.weight.detach().clone()
    moved = []
    for _ in range(100):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optim.clip()
        optim.step()
        moved.append((layer.weight != before).sum().item())
    assert moved[0] < 16  # most are still what they were
    master = optim.master(layer.weight)
    assert (before.float() - master).min() > 0.005
    assert layer.weight.data_ptr() == place
    assert torch.equal(layer.weight, master.bfloat16())


def test_masters_begin_with_every_digit_of_the_folder(folder):
    taught = learner(folder, dtype=torch.bfloat16)
    saved = load_file(folder / "model.safetensors")
    assert taught.model.dtype == torch.bfloat16
    assert all(p.dtype == torch.bfloat16 for p in taught.model.parameters())
    for name, weight in taught.optim.weights().items():
        assert torch.equal(weight, saved[name])
        assert torch.equal(dict(taught.model.named_parameters())[name], saved[name].bfloat16())


def test_positions_keep_their_digits(folder):
    plain, half = learner(folder), learner(folder, dtype=torch.bfloat16)
    buffers = dict(plain.model.named_buffers())
    assert buffers
    assert all(torch.equal(b, buffers[name]) for name, b in half.model.named_buffers())


def test_many_micro_batches_are_as_near_to_float32_as_one(folder, episodes):
    samples = episodes()
    whole = learner(folder)
    expected, one = gradients(whole, credited(whole, samples))
    off = {}
    for budget in (1000, 60):
        half = learner(folder, dtype=torch.bfloat16, budget=budget)
        batch = credited(half, samples)
        found, other = gradients(half, batch)
        assert other["actor/pg_loss"] == pytest.approx(one["actor/pg_loss"], abs=1e-2)
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        every = torch.cat([(found[name] - gradient).flatten() for name, gradient in expected.items()])
        off[len(pack(batch, budget))] = every.norm() / torch.cat([g.flatten() for g in expected.values()]).norm()
    (few, at_once), (many, summed) = sorted(off.items())
    assert few == 1
    assert many > 3
    assert at_once < 0.1
    assert summed < 1.2 * at_once


def test_it_learns_in_place_and_resumes_bitwise(folder, episodes, tmp_path):
    def train(taught, seeds):
        for seed in seeds:
            taught.update(credited(taught, episodes(seed=seed)))
        return taught

    build = lambda: learner(folder, Critical(), dtype=torch.bfloat16, lr=1e-3)  # noqa: E731
    straight = build()
    places = [p.data_ptr() for p in straight.model.parameters()]
    train(straight, range(3))
    assert [p.data_ptr() for p in straight.model.parameters()] == places
    assert all(torch.equal(p, straight.optim.master(p).bfloat16()) for p in straight.model.parameters())
    train(build(), range(2)).save(tmp_path / "c")
    saved = load_file(tmp_path / "c" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    resumed = build()
    resumed.restore(tmp_path / "c")
    train(resumed, [2])
    assert resumed.digest() == straight.digest()
    for name, weight in straight.optim.weights().items():
        assert torch.equal(weight, resumed.optim.weights()[name])
    for name, weight in straight.critic_optim.weights().items():
        assert torch.equal(weight, resumed.critic_optim.weights()[name])
    assert straight.ref.dtype == torch.bfloat16


def test_nan_leaves_masters_and_weights_as_they_were(folder, episodes):
    taught = learner(folder, dtype=torch.bfloat16)
    before = taught.digest()
    batch = credited(taught, episodes())
    batch.entries.advantage[:] = 1e38
    with pytest.raises(LearnerError):
        taught.update(batch)
    assert taught.digest() == before
    metrics = taught.update(credited(taught, episodes()))
    assert metrics["actor/grad_norm"] < 1e3  # nothing was left of the broken one
