"""Two agents on one model, of which one is trained: what the other said carries no loss and moves nothing."""

import pytest
import torch
from msgspec.structs import replace

from strop.config import LoraConfig
from strop.trajectory import Sample, assemble
from tests.unit.learner.practice import gradients, learner
from tests.unit.learner.test_adapters import frozen, on
from tests.unit.learner.test_lora import stirred

pytest.importorskip("peft")
RANK = LoraConfig(rank=4, alpha=8)


def of_two(samples):
    """Every other turn is the other agent's, answered by its policy."""
    names = ("left", "right")

    def share(sample):
        turns = [replace(turn, agent=names[k % 2], policy=names[k % 2]) for k, turn in enumerate(sample.turns)]
        return Sample(sample.rollout, turns)

    return [share(sample) for sample in samples]


def credited(one, samples, agent):
    batch = assemble(samples, agents=[agent], budget=1000, policy=agent)
    one.algorithm.assign_credit(batch)
    return batch


def test_in_the_batch_and_on_the_adapters_parameters(folder, episodes) -> None:
    base = frozen(folder)
    left, right = on(base, folder, RANK), on(base, folder, RANK)
    for one in (left, right):
        stirred(one.model)
    games = of_two(episodes())
    batch = credited(left, games, "left")
    weighed = {batch.turns[turn].agent for turn in batch.entries.turn[batch.entries.weight > 0]}
    sampled = sum(len(turn.response_ids) for game in games for turn in game.turns if turn.agent == "left")
    assert weighed == {turn.agent for turn in batch.turns} == {"left"}
    assert (batch.entries.weight > 0).sum() == sampled

    found, _ = gradients(left, batch)
    before, moved = right.digest(), left.digest()
    left.update(batch)
    assert right.digest() == before
    assert left.digest() != moved
    assert all(tensor.grad is None for name, tensor in right.model.named_parameters() if ".lora_" in name)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-4


def test_gradients_are_the_same_without_the_other_ones_turns(folder, episodes) -> None:
    """They stand in prompts, as what was said to the trained agent, and nowhere else."""
    one, games = learner(folder, lora=RANK), of_two(episodes())
    stirred(one.model)
    alone = [Sample(game.rollout, [turn for turn in game.turns if turn.agent == "left"]) for game in games]
    with_both, _ = gradients(one, credited(one, games, "left"))
    without, _ = gradients(one, credited(one, alone, "left"))
    assert all(torch.equal(with_both[name], without[name]) for name in without)
