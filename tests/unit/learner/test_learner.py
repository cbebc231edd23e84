import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.errors import LearnerError, ModelError, RankOutOfMemory
from strop.learner.learner import Learner
from strop.learner.logprobs import compute_entry_states, compute_logprobs
from strop.trajectory import pack
from tests.unit.learner.practice import Critical, credited, gradients


@pytest.fixture
def learn(folder):
    """A learner in fp64, and a function that makes a credited batch for it."""

    def build(
        updates=1,
        budget=1000,
        algorithm=None,
        dtype=torch.float64,
        optim=None,
        critic_lr=1e-2,
        start_budget=None,
        **more,
    ):
        optim = optim or OptimConfig(lr=1e-2, grad_clip=1e9)
        config = LearnerConfig(
            minibatches=updates,
            token_budget=budget,
            start_budget=start_budget,
            optim=optim,
            critic=OptimConfig(lr=critic_lr),
            device="cpu",
        )
        return Learner(folder, config, algorithm or make(AlgorithmConfig(), config), dtype=dtype, **more)

    return build


@pytest.mark.parametrize("budget", [40, 60, 100])
def test_cutting_a_tree_changes_neither_loss_nor_gradients(learn, episodes, budget):
    samples = episodes()
    whole, cut = learn(), learn(budget=budget)
    expected, one = gradients(whole, credited(whole, samples))
    found, other = gradients(cut, credited(cut, samples))
    assert len(pack(credited(cut, samples), budget)) > 1
    assert other["actor/pg_loss"] == pytest.approx(one["actor/pg_loss"], abs=1e-12)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        # Hugging Face's norms compute in fp32 whatever the weights are: no closer than that here (see tests/parity).
        assert torch.allclose(found[name], gradient, atol=1e-7), name


def test_same_inputs_same_bits(learn, episodes):
    one, other = learn(dtype=torch.float32), learn(dtype=torch.float32)
    for learner, samples in ((one, episodes()), (other, episodes()[::-1])):
        for _ in range(2):
            learner.update(credited(learner, samples))
    assert one.digest() == other.digest() != learn(dtype=torch.float32).digest()


def test_it_learns(learn, episodes):
    learner = learn(dtype=torch.float32)
    samples = episodes(num_groups=1)
    batch = credited(learner, samples)

    def mean(right):
        rows = (batch.entries.rollout == 0) == right
        (piece,) = pack(batch, 1000)
        with torch.no_grad():
            logp = compute_logprobs(learner.model, piece, batch.entries)[0].numpy()
        return logp[rows[piece.entry]].mean()

    before = mean(True), mean(False)
    for _ in range(10):
        learner.update(credited(learner, samples))
    assert mean(True) > before[0] + 0.5
    assert mean(False) < before[1]


def test_parameters_stay_in_place(learn, episodes, tmp_path):
    learner = learn()
    places = [p.data_ptr() for p in learner.model.parameters()]
    learner.update(credited(learner, episodes()))
    learner.save(tmp_path / "c")
    learner.restore(tmp_path / "c")
    assert [p.data_ptr() for p in learner.model.parameters()] == places


def test_metrics(learn, episodes):
    learner = learn(optim=OptimConfig(lr=1e-2, warmup=4))
    batch = credited(learner, episodes())
    metrics = learner.update(batch)
    names = "pg_loss entropy ppo_kl pg_clipfrac grad_norm lr skipped"
    assert {f"actor/{n}" for n in names.split()} < set(metrics)
    assert metrics["actor/lr"] == pytest.approx(2.5e-3)
    assert metrics["actor/ppo_kl"] == 0.0
    assert 0 < metrics["actor/entropy"] < math.log(24)
    assert metrics["actor/pg_loss"] == pytest.approx(-(batch.entries.weight * batch.entries.advantage).sum())
    assert metrics["tree/tokens"] == metrics["perf/total_num_tokens"] == sum(len(p) for p in batch.paths)
    assert metrics["tree/unique_tokens"] == sum(len(p.ids) for p in pack(batch, 1000))
    assert metrics["timing_s/update_actor"] > 0


def test_the_rate_falls_in_a_line_to_nothing(learn, episodes):
    learner = learn(optim=OptimConfig(lr=1e-2, decay=4))
    rates = [learner.update(credited(learner, episodes()))["actor/lr"] for _ in range(5)]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2, 0.0])


@pytest.mark.parametrize("updates", [1, 2])
def test_every_logprob_is_compared_under_the_weights_that_sampled(learn, episodes, updates):
    learner = learn(updates=updates)
    samples = episodes(rewards=lambda g, m: float(g > 0 and m == 0))  # the first group teaches nothing
    batch = credited(learner, samples)
    with torch.no_grad():
        for piece in pack(batch, 1000):
            batch.entries.behaviour[piece.entry] = compute_logprobs(learner.model, piece, batch.entries)[0].numpy()
    odd = int(np.flatnonzero(batch.entries.group == 0)[0])
    batch.entries.behaviour[odd] -= 0.25
    batch.entries.exact[-1] = False
    batch.entries.behaviour[-1] = -99.0
    metrics = learner.update(batch)
    assert metrics["training/rollout_logprobs_checked"] == len(batch.entries) - 1
    assert metrics["training/rollout_logprobs_diff_max"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["training/rollout_logprobs_diff_mean"] == pytest.approx(0.25 / (len(batch.entries) - 1), abs=1e-6)
    assert 0 < metrics["training/rollout_probs_diff_max"] < 0.25
    assert metrics["training/rollout_logprobs_off"] == 1


@pytest.mark.parametrize("wrong", [lambda loss: loss[:1], lambda loss: loss.sum()])
def test_a_loss_that_is_not_one_per_entry_is_refused(learn, episodes, monkeypatch, wrong):
    """It would be broadcast, and train on something else without a word."""
    learner = learn()
    compute_loss = learner.algorithm.compute_loss

    def broken(*arguments):
        loss, metrics = compute_loss(*arguments)
        return wrong(loss), metrics

    monkeypatch.setattr(learner.algorithm, "compute_loss", broken)
    with pytest.raises(LearnerError, match="Fix: return one loss for each"):
        learner.update(credited(learner, episodes()))


@pytest.mark.parametrize("updates", [1, 2])
def test_out_of_memory_goes_on_with_smaller_pieces_and_the_same_result(learn, episodes, monkeypatch, updates):
    """As if memory held 40 tokens: gradients of what had been done are dropped, nothing counts twice."""
    samples = episodes()
    plain, short = learn(updates=updates), learn(updates=updates)
    expected = plain.update(credited(plain, samples))
    longest = max(len(path) for path in credited(plain, samples).paths)
    held = 2 * longest

    def states(model, piece, way=None):
        if len(piece.ids) > held:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute_entry_states(model, piece)

    monkeypatch.setattr("strop.learner.logprobs.compute_entry_states", states)
    found = short.update(credited(short, samples))
    assert found["perf/token_budget"] < expected["perf/token_budget"] == 1000
    assert found["perf/token_budget"] <= held
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "tree/tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    held = longest - 1
    before = short.digest()
    with pytest.raises(LearnerError, match="does not hold an update"):
        short.update(credited(short, samples))
    assert short.digest() == before


def test_several_optimizer_steps_take_shares_of_the_groups(learn, episodes):
    learner = learn(updates=2)
    batch = credited(learner, episodes(num_groups=4))
    assert not np.isnan(batch.entries.proximal).any()
    metrics = learner.update(batch)
    assert learner.optim.steps == 2
    assert metrics["actor/ppo_kl"] != 0.0  # the second share is read after the first one moved the weights
    assert metrics["tree/tokens"] == sum(len(p) for p in batch.paths)


def test_shares_have_the_gradient_of_the_batch_on_average(learn, episodes):
    samples = episodes(num_groups=4)
    whole, halves = learn(), learn(updates=2)
    expected, _ = gradients(whole, credited(whole, samples))
    caught = []

    def catch():
        caught.append({n: p.grad.clone() for n, p in halves.model.named_parameters()})
        halves.optim.clear()
        return 0.0

    halves.optim.step = catch
    halves.update(credited(halves, samples))
    for name, gradient in expected.items():
        assert torch.allclose((caught[0][name] + caught[1][name]) / 2, gradient, atol=1e-7), name


def test_a_single_group_makes_a_single_optimizer_step_of_full_size(learn, episodes):
    samples = episodes(num_groups=1)
    one, many = learn(updates=1), learn(updates=3)
    expected, _ = gradients(one, credited(one, samples))
    found, _ = gradients(many, credited(many, samples))
    assert all(torch.allclose(found[n], g, atol=1e-9) for n, g in expected.items())


def test_nothing_to_learn_is_said_and_changes_nothing(learn, episodes):
    learner = learn()
    before = learner.digest()
    metrics = learner.update(credited(learner, episodes(rewards=lambda g, m: 1.0)))
    assert metrics["actor/skipped"] == 1.0
    assert metrics["training/rollout_logprobs_checked"] > 0
    assert learner.digest() == before
    assert learner.optim.steps == 0
    assert learner.update(credited(learner, []))["actor/skipped"] == 1.0


def test_nan_is_refused_with_the_weights_as_they_were(learn, episodes):
    learner = learn()
    before = learner.digest()
    batch = credited(learner, episodes())
    batch.entries.advantage[np.flatnonzero(batch.entries.weight)[0]] = math.nan
    with pytest.raises(LearnerError, match="nan"):
        learner.update(batch)
    assert learner.digest() == before
    batch = credited(learner, episodes())
    batch.entries.advantage[:] = 1e308
    with pytest.raises(LearnerError):
        learner.update(batch)
    assert learner.digest() == before
    assert all(p.grad is None for p in learner.model.parameters())


def test_chunks_of_logits_change_nothing(learn, episodes):
    learner = learn()
    batch = credited(learner, episodes(temperature=0.7))
    (piece,) = pack(batch, 1000)

    def run(chunk):
        logp, entropy = compute_logprobs(learner.model, piece, batch.entries, chunk=chunk)
        (logp.sum() + entropy.sum()).backward()
        result = logp.detach(), entropy.detach(), learner.model.lm_head.weight.grad.clone()
        learner.optim.clear()
        return result

    for one, other in zip(run(10**9), run(50), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_environment_tokens_carry_no_loss(learn, episodes):
    """Logits are read for the tokens that were sampled, each where it stands in its rollout, and for no others."""
    learner = learn()
    batch = credited(learner, episodes())
    sampled = [(t.rollout, len(t.prompt_ids) + k) for t in batch.turns for k in range(len(t.response_ids))]
    read = []
    for piece in pack(batch, 1000):
        depth = piece.pos[piece.at] + 1
        rollouts = [batch.samples[r].rollout.id for r in batch.entries.rollout[piece.entry]]
        read += zip(rollouts, depth.tolist(), strict=True)
    assert sorted(read) == sorted(sampled)


def test_checkpoint_resumes_bitwise(learn, episodes, tmp_path):
    def train(learner, seeds):
        for seed in seeds:
            learner.update(credited(learner, episodes(seed=seed)))
        return learner

    optim = OptimConfig(lr=1e-2, warmup=5, weight_decay=0.1)
    straight = train(learn(dtype=torch.float32, optim=optim), range(4))
    train(learn(dtype=torch.float32, optim=optim), range(2)).save(tmp_path / "c", {"step": 2, "version": "1.2"})
    resumed = learn(dtype=torch.float32, optim=optim)
    assert resumed.restore(tmp_path / "c") == {"step": 2, "version": "1.2"}
    assert train(resumed, range(2, 4)).digest() == straight.digest()


def test_a_checkpoint_is_a_plain_folder(learn, episodes, folder, tmp_path):
    """It loads as it is, with no word about dtypes, to the very weights: config.json must not say another dtype."""
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    learner = learn(dtype=torch.float32)
    learner.folder = Path(shutil.copytree(folder, tmp_path.with_name("halved")))  # others use the folder too
    (learner.folder / "config.json").write_text(json.dumps(config))
    (tmp_path / ".c.new").mkdir()  # left by a crash
    learner.update(credited(learner, episodes()))
    learner.save(tmp_path / "c", {"step": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert json.loads((tmp_path / "c" / "strop.json").read_text()) == {"step": 1}
    assert (tmp_path / "c" / "tokenizer_config.json").exists()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert all(torch.equal(p, dict(stock.named_parameters())[n]) for n, p in learner.model.named_parameters())
    with pytest.raises(ModelError, match="not a checkpoint"):
        learner.restore(tmp_path)


class Critic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(24, 1).double()

    def forward(self, piece):
        return self.table(torch.from_numpy(piece.ids[piece.at]))[:, 0]


def test_a_critic_and_a_reference_are_scored_trained_and_saved(learn, episodes, tmp_path):
    learner = learn(algorithm=Critical(), critic=Critic(), critic_lr=0.1)
    losses = []
    for _ in range(20):
        batch = credited(learner, episodes())
        assert not np.isnan([batch.entries.proximal, batch.entries.ref, batch.entries.value]).any()
        losses.append(learner.update(batch)["critic/vf_loss"])
    assert losses[-1] < losses[0] / 4
    assert not np.allclose(batch.entries.ref, batch.entries.proximal)  # the reference stayed where the policy began
    learner.save(tmp_path / "c")
    other = learn(algorithm=Critical(), critic=Critic())
    other.restore(tmp_path / "c")
    assert torch.equal(other.critic.table.weight, learner.critic.table.weight)


def test_an_algorithm_that_asks_for_values_gets_a_critic_that_learns(learn, episodes):
    learner = learn(algorithm=Critical(), critic_lr=1e-2)
    errors = []
    for _ in range(12):
        batch = credited(learner, episodes())
        assert np.isfinite(batch.entries.value).all()
        errors.append(learner.update(batch)["critic/vf_loss"])
    assert errors[-1] < errors[0] / 2


def test_a_rank_that_runs_out_of_memory_says_so(learn, episodes, monkeypatch):
    """The others are in the middle of a pass that needs it: it cannot go on by itself."""
    learner = learn()
    batch = credited(learner, episodes())

    def states(model, piece, way=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("strop.learner.logprobs.compute_entry_states", states)
    monkeypatch.setattr(learner.ranks, "count", 2)
    monkeypatch.setattr(learner.ranks, "num_groups", 2)
    with pytest.raises(RankOutOfMemory, match=r"rank 0 of 2 .* Fix: resume with learner.start_budget=500, "):
        learner.update(batch)


def test_micro_batches_begin_with_what_memory_is_known_to_hold(learn, episodes):
    plain, short = learn(), learn(start_budget=40)
    expected, found = (one.update(credited(one, episodes())) for one in (plain, short))
    assert found["perf/token_budget"] == 40
    assert found["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-5)
