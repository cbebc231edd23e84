import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.algorithms import EntryTensors, make
from strop.algorithms.ppo import compute_value_loss, explain_variance
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.learner.learner import Learner
from tests.unit.algorithms.rollouts import batch_of, credited, sample, turn


def test_advantages_and_returns_come_from_values():
    batch, metrics = credited("ppo", sample(0, 1.0, turn(2), turn(1)), value=[0.5, 0.25, 0.5], whiten=False)
    assert batch.entries.ret.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert batch.entries.advantage.tolist() == pytest.approx([0.5, 0.75, 0.5])
    assert batch.entries.weight.tolist() == pytest.approx([1 / 3] * 3)
    assert batch.dropped == {}  # a critic is compared with: no group is needed
    assert metrics["critic/values/mean"] == pytest.approx(1.25 / 3)
    assert metrics["critic/returns/max"] == 1.0


def test_advantages_are_scaled_over_trained_tokens_only():
    samples = [
        sample(0, 1.0, turn(2), turn(2, warmth=0.0)),
        sample(1, 0.0, turn(1)),
        sample(2, 9.0, turn(3), status="failed", cause="lost_runner"),
    ]
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.6, 0.0, 0.0, 0.0])
    plain, _ = credited("ppo", *samples, value=values, whiten=False)
    batch, _ = credited("ppo", *samples, value=values)
    trained = plain.entries.weight > 0
    assert trained.tolist() == [True, True, False, False, True, False, False, False]
    advantage = plain.entries.advantage[trained]
    expected = (advantage - advantage.mean()) / np.sqrt(advantage.var(ddof=1) + 1e-8)
    assert batch.entries.advantage[trained] == pytest.approx(expected)
    assert np.array_equal(batch.entries.ret, plain.entries.ret)
    assert not batch.entries.advantage[~trained].any()


def test_one_token_is_not_scaled():
    batch, _ = credited("ppo", sample(0, 1.0, turn(1)), value=[0.25])
    assert batch.entries.advantage.tolist() == [0.75]


def test_penalties_land_on_their_tokens():
    batch = batch_of(sample(0, 1.0, turn(3)))
    batch.entries.value[:] = 0.0
    batch.entries.proximal[:] = [-1.0, -1.0, -1.0]
    batch.entries.ref[:] = [-1.0, -2.0, -1.0]
    settings = {"whiten": False, "kl": "reward", "kl_estimator": "k1", "kl_coef": 0.1}
    make(AlgorithmConfig(name="ppo", settings=settings), LearnerConfig()).assign_credit(batch)
    assert batch.entries.ret.tolist() == pytest.approx([0.9, 0.9, 1.0])


def test_a_batch_that_was_not_scored_is_refused():
    with pytest.raises(AssertionError, match="score the batch"):
        credited("ppo", sample(0, 1.0, turn(1)))


def test_explained_variance():
    ret = np.array([0.0, 1.0, 2.0])
    assert explain_variance(ret, ret)["critic/vf_explained_var"] == pytest.approx(1.0)
    assert explain_variance(ret, np.ones(3))["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)
    assert explain_variance(ret, -ret)["critic/vf_explained_var"] < -1
    assert explain_variance(ret[:1], ret[:1]) == {}


@pytest.mark.parametrize(
    ("value", "loss", "clipped", "trains"),
    [
        (0.2, 0.5 * 0.8**2, False, True),
        (0.9, 0.5 * 0.5**2, True, False),  # gone far enough: no gain in going on
        (-0.9, 0.5 * 1.9**2, False, True),  # gone the wrong way: pulled back
    ],
)
def test_a_value_moves_by_the_clip_at_most(value, loss, clipped, trains):
    now = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found, held = compute_value_loss(now, torch.zeros(1).double(), torch.ones(1).double(), 0.5)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert held.item() == clipped
    assert (now.grad.item() != 0) == trains


def test_the_critics_loss_is_added_and_reaches_the_critic():
    algorithm = make(AlgorithmConfig(name="ppo", settings={"vf_coef": 0.5}), LearnerConfig())
    column = {name: torch.zeros(2).double() for name in EntryTensors.__dataclass_fields__}
    view = EntryTensors(
        **column | {"advantage": torch.tensor([1.0, -1.0]).double(), "ret": torch.tensor([1.0, 0.0]).double()}
    )
    logp = torch.zeros(2).double().requires_grad_()
    value = torch.tensor([0.25, 0.25]).double().requires_grad_()
    loss, metrics = algorithm.compute_loss(logp, logp.detach(), value, view)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.0 + 0.25 * 0.75**2, 1.0 + 0.25 * 0.25**2])
    assert logp.grad.tolist() == pytest.approx([-1.0, 1.0])
    assert value.grad.tolist() == pytest.approx([-0.375, 0.125])
    assert metrics["critic/vf_loss"].tolist() == pytest.approx([0.5 * 0.75**2, 0.5 * 0.25**2])
    assert metrics["critic/vf_clipfrac"].tolist() == [0.0, 0.0]


def test_values_and_proximal_are_asked_for():
    assert make(AlgorithmConfig(name="ppo"), LearnerConfig()).needs == {"proximal", "value"}
    assert make(AlgorithmConfig(name="ppo", settings={"kl": "loss"}), LearnerConfig()).needs == {
        "proximal",
        "value",
        "ref",
    }


def test_a_critic_learns_what_its_policy_gets(tmp_path):
    """A real model, trained for a few steps on rollouts that got 1 or 0 by how their prompt begins."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    learner_config = LearnerConfig(
        minibatches=2, token_budget=64, optim=OptimConfig(lr=1e-4), critic=OptimConfig(lr=2e-2, grad_clip=1e9)
    )
    algorithm = make(AlgorithmConfig(name="ppo"), learner_config)
    learner = Learner(tmp_path, learner_config, algorithm, seed=1)
    rng = random.Random(0)
    history = []
    for _ in range(14):
        samples = []
        for member in range(8):
            head = 1 + member % 2
            first = [rng.randrange(16) for _ in range(3)]
            second = [head, 5, *first, 7]
            turns = [turn(prompt=[head, 5], ids=first), turn(prompt=second, ids=[rng.randrange(16) for _ in range(2)])]
            samples.append(sample(member, float(member % 2), *turns, group=f"g{member % 4}"))
        batch = batch_of(*samples)
        learner.score(batch)
        history.append(algorithm.assign_credit(batch) | learner.update(batch))
    assert history[0]["critic/values/mean"] == 0.0  # the head begins at 0
    assert history[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    assert history[-1]["critic/vf_explained_var"] > 0.8
    assert history[-1]["critic/vf_loss"] < history[0]["critic/vf_loss"] / 3
    assert history[-1]["critic/grad_norm"] > 0
