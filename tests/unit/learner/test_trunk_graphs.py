"""Recorded passes give what passes give: hidden states, and every parameter's gradient, in its master's.

Where there is no GPU a recording is a function that is called again; what is around it is the same.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from strop.learner.blocks import PLAIN
from strop.learner.flex_attention import FlexTree
from strop.learner.logprobs import compute_entry_states
from strop.learner.masters import Masters
from strop.learner.model import load
from strop.learner.tree_attention import for_all_heads
from strop.learner.trunk_graphs import TrunkGraphs
from strop.trajectory import pack
from tests.unit.learner.practice import Critical, credited, gradients, learner

BLOCK = 16


class CalledAgain:
    """A recorder that counts."""

    made = 0

    def warm_up(self, function):
        function()

    def record(self, function):
        CalledAgain.made += 1
        function()
        return torch.enable_grad()(function)


@pytest.fixture(autouse=True)
def dense_attention(monkeypatch):
    """By the rule of the tree's mask: FlexAttention has no backward pass on CPUs."""

    def attend(self, query, key, value, scaling):
        key, value = for_all_heads(query, key, value)
        places = torch.arange(query.shape[2])
        seen = self.mask.mask_mod(0, 0, places[:, None], places[None])
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)

    monkeypatch.setattr(FlexTree, "attend", attend)


def record(model, masters, recorder=CalledAgain):
    graphs = TrunkGraphs(model, masters, recorder=recorder, size_of=lambda n: -(-n // 64) * 64, block=BLOCK)
    CalledAgain.made = 0
    return graphs


def masters_of(model):
    return Masters({parameter: parameter.detach().double() for parameter in model.parameters()})


@pytest.fixture
def pieces(folder, episodes):
    batch = credited(learner(folder), episodes())
    found = pack(batch, 60)
    assert len(found) > 2
    return found


def test_states_and_gradients_are_those_of_plain_passes(folder, pieces):
    plain = load(folder)
    model = copy.deepcopy(plain)
    wanted, found = masters_of(plain), masters_of(model)
    graphs = record(model, found)
    for piece in pieces:
        states = compute_entry_states(plain, piece)
        hidden = graphs.run(piece, PLAIN)
        ours = hidden.index_select(0, torch.from_numpy(piece.at))
        assert torch.allclose(ours, states, atol=1e-5)
        for some in (states, ours):
            (some * torch.linspace(-1, 1, some.numel()).view_as(some)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    wanted.take_gradients()
    found.take_gradients()
    for theirs, ours in zip(wanted.of.values(), found.of.values(), strict=True):
        assert torch.allclose(theirs.grad, ours.grad, atol=1e-4)
        assert ours.grad.abs().max() > 0


def test_a_size_is_recorded_once_and_again_when_parameters_move(folder, pieces):
    model = load(folder)
    graphs = record(model, masters_of(model))
    with torch.no_grad():
        before = graphs.run(pieces[0], PLAIN).clone()
        graphs.run(pieces[0], PLAIN)
        assert CalledAgain.made == 2  # forward and backward
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(graphs.run(pieces[0], PLAIN), before)
    assert CalledAgain.made == 4


def test_a_pass_whose_memory_was_used_again_has_no_backward(folder, pieces):
    model = load(folder)
    graphs = record(model, masters_of(model))
    first = graphs.run(pieces[0], PLAIN)
    graphs.run(pieces[1], PLAIN)
    with pytest.raises(AssertionError, match="written over"):
        first.sum().backward()


def test_what_cannot_be_recorded_is_run_plainly(folder, episodes, caplog):
    class Refuses(CalledAgain):
        def record(self, function):
            raise RuntimeError("operation not permitted when stream is capturing")

    taught = learner(folder, dtype=torch.bfloat16)
    taught.graphs = record(taught.model, taught.optim.masters, Refuses)
    assert taught.update(credited(taught, episodes()))["actor/grad_norm"] > 0
    assert "cannot be recorded" in caplog.text


def test_a_size_for_which_there_is_no_memory_leaves_smaller_ones(folder, pieces, caplog):
    class Narrow(CalledAgain):
        def warm_up(self, function):
            function()
            if narrow:
                raise torch.OutOfMemoryError("a pass keeps 30 GiB of the GPU's 80")

    model = load(folder)
    graphs = record(model, masters_of(model), Narrow)
    narrow = True
    whole = replace(pieces[0], **{name: np.tile(getattr(pieces[0], name), 3) for name in ("ids", "pos", "end")})
    assert graphs.run(whole, PLAIN) is None
    narrow = False
    assert graphs.run(whole, PLAIN) is None
    assert graphs.run(pieces[0], PLAIN) is not None
    assert "30 GiB" in caplog.text


def test_out_of_memory_gives_recordings_up_before_smaller_pieces(folder, episodes, monkeypatch):
    taught = learner(folder, dtype=torch.bfloat16)
    taught.graphs = graphs = record(taught.model, taught.optim.masters)
    taken = graphs.run

    def run(piece, way):
        taken(piece, way)
        raise torch.OutOfMemoryError("what recordings keep is missing elsewhere")

    monkeypatch.setattr(graphs, "run", run)
    budget = taught.budget
    assert taught.update(credited(taught, episodes()))["actor/grad_norm"] > 0
    assert taught.graphs is None
    assert taught.budget == budget


@pytest.mark.parametrize("budget", [1000, 60])
@pytest.mark.parametrize("critic", ["shared", "own"])
def test_an_update_applies_the_same_gradients(folder, episodes, budget, critic):
    """As near as bfloat16 is: a tied weight's two gradients are summed in float32 here."""
    samples = episodes()
    found = []
    for recorded in (False, True):
        taught = learner(folder, Critical(), dtype=torch.bfloat16, budget=budget, critic_kind=critic)
        if recorded:
            taught.graphs = record(taught.model, taught.optim.masters)
        found.append(gradients(taught, credited(taught, samples)))
    assert CalledAgain.made
    (plain, metrics), (ours, others) = found
    assert others["actor/entropy"] == pytest.approx(metrics["actor/entropy"], rel=1e-2)
    apart = torch.cat([(ours[name] - plain[name]).flatten() for name in plain]).norm()
    assert apart < 0.05 * torch.cat([gradient.flatten() for gradient in plain.values()]).norm()
