"""A critic on the policy's own hidden states: one pass, two losses."""

import numpy as np
import torch

from strop.learner.critic import ValueHead
from strop.trajectory import pack
from tests.unit.learner.practice import Critical, credited, gradients, learner


def test_a_shared_critic_learns_and_costs_no_pass(folder, episodes):
    taught = learner(folder, Critical(), critic_kind="shared")
    assert isinstance(taught.critic, ValueHead)
    assert sum(p.numel() for p in taught.critic.parameters()) == 16 + 1
    passes = []
    taught.model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    batch = credited(taught, episodes())
    assert (batch.entries.value == 0.0).all()  # the head begins at 0
    pieces = len(pack(batch, 1000))
    assert len(passes) == pieces
    taught.update(batch)
    assert len(passes) == 2 * pieces
    errors = [taught.update(credited(taught, episodes()))["critic/vf_loss"] for _ in range(12)]
    assert errors[-1] < errors[0] / 2


class Valued(Critical):
    """Only the values' loss."""

    def compute_loss(self, logp, entropy, value, entries):
        return (value - entries.ret).pow(2), {}


def test_its_loss_trains_the_trunk(folder, episodes):
    for kind, moves in (("shared", True), ("own", False)):
        taught = learner(folder, Valued(), critic_kind=kind)
        with torch.no_grad():
            head = taught.critic if kind == "shared" else taught.critic.head
            head.weight.fill_(0.1)
        taught.optim.clear()
        batch = credited(taught, episodes())
        if moves:
            found, _ = gradients(taught, batch)
            assert found["model.layers.0.mlp.up_proj.weight"].abs().max() > 0
        else:
            before = taught.digest()
            taught.update(batch)
            assert taught.digest() == before


def test_it_is_saved_and_restored(folder, episodes, tmp_path):
    taught = learner(folder, Critical(), critic_kind="shared", dtype=torch.bfloat16)
    for _ in range(3):
        taught.update(credited(taught, episodes()))
    assert taught.critic.weight.dtype == torch.float32
    assert not np.allclose(credited(taught, episodes()).entries.value, 0.0)
    taught.save(tmp_path / "c")
    other = learner(folder, Critical(), critic_kind="shared", dtype=torch.bfloat16)
    other.restore(tmp_path / "c")
    assert torch.equal(other.critic.weight, taught.critic.weight)
    assert np.array_equal(credited(other, episodes()).entries.value, credited(taught, episodes()).entries.value)
