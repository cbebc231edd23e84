"""The token tree against the plainest thing that could be right: one row per turn, stock attention, loops.

In fp64, with Hugging Face's norms kept in fp64 too (they round to fp32 otherwise, whatever the weights are).
"""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.learner.logprobs import logprobs
from strop.learner.step import Learner
from strop.trajectory import Sample, assemble, pack
from strop.types import Reward, Rollout, Sampling, Task, Turn

VOCAB, TEMPERATURE, CLIP = 32, 0.8, 0.2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def episodes(seed):
    """Rollouts whose turns extend, fork, repeat each other and leave untrained agents' words in their contexts."""
    rng = random.Random(seed)
    samples = []
    for g in range(3):
        start = [rng.randrange(VOCAB) for _ in range(12)]
        for m in range(4):
            id, context, turns = f"g{g}.{m}", start, []
            for k in range(rng.randrange(1, 5)):
                response = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]  # few ids: rollouts agree at times
                turns.append(
                    Turn(
                        id=f"{id}/1/{k}",
                        rollout=id,
                        attempt=1,
                        prompt_ids=context,
                        response_ids=response,
                        logprobs=[-1.0] * len(response),
                        versions=[(0, "1.0")],
                        finish="abandoned" if k == 3 else "stop",
                        sampling=Sampling(temperature=TEMPERATURE),
                        agent=rng.choice(["main", "main", "main", "judge"]),
                        started=float(k),
                        ended=k + 0.5,
                    )
                )
                context = context + response + [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
                if rng.random() < 0.2:
                    context = context[: rng.randrange(5, len(context))]
            reward = Reward(value=1.0 if g == 2 else round(rng.random(), 3))  # the last group has no variance
            rollout = Rollout(
                id=id, group=f"g{g}", member=m, task=Task(id="t"), status="succeeded", created=0.0, rewards=(reward,)
            )
            samples.append(Sample(rollout, turns))
    return samples


def rows(model, samples, old=None):
    """GRPO written out: returns the loss (with gradient) and every trained turn's logprobs."""
    advantages = {}
    for g in range(2):
        members = [s.rollout for s in samples if s.rollout.group == f"g{g}"]
        values = torch.tensor([r.rewards[0].value for r in members], dtype=torch.float64)
        for r, a in zip(members, (values - values.mean()) / (values.std() + 1e-6), strict=True):
            advantages[r.id] = a
    logps, losses = {}, []
    for turn in [t for s in samples for t in s.turns if t.agent == "main"]:
        logits = model(input_ids=torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0] / TEMPERATURE
        picked = []
        for k, token in enumerate(turn.response_ids):
            picked.append(torch.log_softmax(logits[len(turn.prompt_ids) + k - 1], 0)[token])
        logps[turn.id] = torch.stack(picked)
        if turn.rollout in advantages and turn.finish == "stop":
            before = logps[turn.id].detach() if old is None else old[turn.id]
            ratio = torch.exp(logps[turn.id] - before)
            a = advantages[turn.rollout]
            losses.append(-torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a))
    return torch.cat(losses).mean(), logps


@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_gradients_and_logprobs(folder, seed, budget):
    samples = episodes(seed)
    config = LearnerConfig(token_budget=budget, optim=OptimConfig(lr=1e-2, grad_clip=1e9))
    learner = Learner(folder, config, make(AlgorithmConfig(settings={"clip": CLIP}), config), dtype=torch.float64)
    stock = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")

    # Moved off the weights that sampled, so that ratios differ from 1 and some are clipped.
    batch = assemble(samples, agents=["main"], budget=budget)
    _, old = rows(stock, samples)
    old = {name: logp.detach() for name, logp in old.items()}
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for ours, theirs in zip(learner.model.parameters(), stock.parameters(), strict=True):
            change = 0.03 * torch.randn(ours.shape, generator=noise, dtype=torch.float64)
            ours += change
            theirs += change
    batch.entries.proximal[:] = torch.cat([old[t.id] for t in batch.turns]).numpy()
    learner.algorithm.credit(batch)

    loss, logps = rows(stock, samples, old)
    loss.backward()
    caught = {}
    learner.optim.step = lambda: caught.update({n: p.grad.clone() for n, p in learner.model.named_parameters()}) or 0.0
    metrics = learner.update(batch)

    assert metrics["actor/pg_clipfrac"] > 0
    assert abs(metrics["actor/pg_loss"] - loss.item()) < 1e-9
    for name, parameter in stock.named_parameters():
        assert parameter.grad.abs().max() > 1e-6
        assert (caught[name] - parameter.grad).abs().max() < 1e-9, name
    for piece in pack(batch, budget):
        ours = logprobs(learner.model, piece, batch.entries)[0]
        for k, entry in enumerate(piece.entry):
            turn = batch.turns[batch.entries.turn[entry]]
            assert abs(ours[k] - logps[turn.id][batch.entries.index[entry]]) < 1e-9
