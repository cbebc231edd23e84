"""What is foreseen against what is measured, on a CPU."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.config import LearnerConfig, LoraConfig
from strop.learner import lora
from strop.learner.blocks import Way
from strop.learner.logprobs import compute_hidden_states, compute_logprobs
from strop.learner.masters import Masters, lower
from strop.learner.memory import plan
from strop.learner.model import load
from strop.trajectory import Entries, MicroBatch
from tests.unit.learner.practice import Live

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOKENS = 512


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("made")
    LlamaForCausalLM(config).save_pretrained(path)
    return path, config


def one_path():
    """The worst micro-batch there is: a single turn as long as the budget, all of it sampled but the first token."""
    every = np.arange(TOKENS)
    piece = MicroBatch(
        ids=every % 500, pos=every, end=np.full(TOKENS, TOKENS), entry=np.arange(TOKENS - 1), at=np.arange(TOKENS - 1)
    )
    zeros = {name: np.zeros(TOKENS - 1) for name in Entries.__dataclass_fields__}
    return piece, Entries(**zeros | {"target": every[1:] % 500, "temperature": np.ones(TOKENS - 1)})


def test_ranks_share_what_has_the_size_of_a_model(made):
    _, shape = made
    alone = plan(shape, LearnerConfig(token_budget=TOKENS), 2**40, device=CPU, reference=True, critic=True)
    four = plan(shape, LearnerConfig(token_budget=TOKENS, ranks=4), 2**40, device=CPU, reference=True, critic=True)
    for name in ("gradients", "optimizer", "reference", "critic", "snapshot"):
        assert getattr(four, name) == getattr(alone, name) // 4 > 0
    assert alone.weights // 4 < four.weights < alone.weights
    assert four.activations == alone.activations
    split = plan(shape, LearnerConfig(token_budget=TOKENS, ranks=4, sequence_parallel=2), 2**40, device=CPU)
    assert split.activations * 2 == plan(shape, LearnerConfig(token_budget=TOKENS), 2**40, device=CPU).activations


CASES = {
    "plain": LearnerConfig(token_budget=TOKENS),
    "bfloat16": LearnerConfig(token_budget=TOKENS, dtype="bfloat16"),
    "computed again": LearnerConfig(token_budget=TOKENS, gradient_checkpointing=True),
    "an adapter": LearnerConfig(token_budget=TOKENS, lora=LoraConfig(rank=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_backward_pass_takes_what_was_foreseen(made, name):
    """Within a tenth of the peak, beyond the weights, that operations really reached."""
    folder, shape = made
    config = CASES[name]
    if config.lora.rank:
        pytest.importorskip("peft")
    model = load(folder)
    if config.lora.rank:
        lora.attach(model, config.lora)
    masters = Masters(lower(model, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32))
    way = Way(recompute=config.gradient_checkpointing)
    with Live() as live:
        for _ in range(2):  # the second finds the gradients of the first
            logp, entropy = compute_logprobs(model, *one_path(), way=way)
            (logp + entropy).sum().backward()
            del logp, entropy
    found = plan(shape, config, 2**40, device=CPU)
    foreseen = found.peak - found.weights - found.optimizer
    assert foreseen == pytest.approx(live.peak, rel=0.1), f"{foreseen / live.peak:.2f}"
    assert found.weights == sum(p.nbytes for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.gradients == 4 * trained
    assert found.optimizer == (8 + 4 * bool(masters.of)) * trained
    assert found.fits
    assert found.advice == ""


def test_activations_are_those_that_autograd_keeps(made):
    folder, shape = made
    model = load(folder)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.data_ptr() for p in model.parameters()}
    piece, _ = one_path()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = compute_hidden_states(model, piece.ids, piece.pos, piece.end)
    measured = sum(size for place, size in kept.items() if place not in weights) + out.nbytes
    assert plan(shape, CASES["plain"], 2**40, device=CPU).activations == pytest.approx(measured, rel=0.02)


QWEN_LIKE = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 128,
}  # fmt: skip


def test_settings_save_what_they_should_on_a_gpu():
    shape = LlamaConfig(**QWEN_LIKE)
    base = LearnerConfig(token_budget=16384)
    whole = plan(shape, base, 2**40, device=GPU, reference=True, critic=True)
    assert whole.weights == pytest.approx(2 * 1.54e9, rel=0.02)
    assert whole.optimizer == 2 * 12 * whole.weights // 2
    assert whole.reference == whole.critic == whole.weights

    def peak(**more):
        return plan(shape, LearnerConfig(token_budget=16384, **more), 2**40, device=GPU).peak

    assert peak(gradient_checkpointing=True) < peak()
    assert peak(gradient_checkpointing=True, offload=True) < peak(gradient_checkpointing=True)
    assert peak(dtype="float32") > peak()
    pytest.importorskip("peft")
    small = plan(shape, LearnerConfig(lora=LoraConfig(rank=16)), 2**40, device=GPU, reference=True)
    assert small.reference == 0
    assert small.optimizer < whole.optimizer / 50


@pytest.mark.parametrize(
    ("gib", "settings", "said"),
    [
        (200, {"token_budget": 16384}, ""),
        (50, {"token_budget": 16384}, "learner.gradient_checkpointing to true"),
        (40, {"token_budget": 65536, "gradient_checkpointing": True}, "learner.token_budget to"),
        (1, {}, "smaller model"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence_with_the_setting(gib, settings, said):
    pytest.importorskip("peft")
    found = plan(LlamaConfig(**QWEN_LIKE), LearnerConfig(**settings), gib * 2**30, device=GPU)
    assert said in found.advice
    assert found.fits == (not said)
    assert found.advice.count(":") <= 1
