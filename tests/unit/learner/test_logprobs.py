"""Logits by the chunk: the same numbers as all at once, and never more than a chunk of them."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.learner.blocks import Way
from strop.learner.logprobs import _Chunks, _pick, compute_entry_states, compute_logprobs
from strop.learner.model import load
from strop.trajectory import pack
from tests.unit.learner.practice import Live, credited, gradients, learner


@pytest.mark.parametrize("with_bias", [True, False])
def test_chunks_have_the_gradients_of_the_whole(with_bias):
    torch.manual_seed(0)
    states = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(17, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, 17, (11,))
    warmth = torch.rand(11, dtype=torch.float64) + 0.5
    push = torch.randn(2, 11, dtype=torch.float64)
    inputs = [t for t in (states, weight, bias) if t is not None]

    whole = torch.stack(_pick(torch.nn.functional.linear(states, weight, bias), target, warmth)[:2])
    chunks = torch.stack(_Chunks.apply(states, weight, bias, target, warmth, None, 3, False))
    assert torch.allclose(whole, chunks, atol=1e-13)
    expected, found = (torch.autograd.grad((out * push).sum(), inputs) for out in (whole, chunks))
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(expected, found, strict=True))


def test_a_frozen_head_gets_no_gradient():
    states = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(9, 4)
    logp, entropy = _Chunks.apply(states, weight, None, torch.zeros(5, dtype=torch.long), torch.ones(5), None, 2, False)
    (logp + entropy).sum().backward()
    assert states.grad.abs().sum() > 0
    assert weight.grad is None


def test_many_chunks_in_bfloat16_lose_nothing_of_the_heads_gradient():
    """Summed in bfloat16, three hundred equal parts would stand still at 256 of them."""
    rows = 300
    states = torch.ones(rows, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long)
    logp, entropy = _Chunks.apply(states, weight, None, target, torch.ones(rows), None, 1, False)
    assert logp.dtype == entropy.dtype == torch.float32
    logp.sum().backward()
    assert weight.grad.float()[0].tolist() == [rows / 2, rows / 2]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose logits are most of its memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_a_chunk_and_not_the_batch(wide, episodes, dtype):
    model = load(wide, dtype)
    batch = credited(learner(wide), episodes(num_groups=4, num_members=4))
    (piece,) = pack(batch, 10**4)
    entries, vocabulary, rows = len(piece.entry), 4096, 8
    assert entries > 16 * rows

    def run(outputs):
        with Live() as live:
            sum(out.sum() for out in outputs()).backward()
        model.zero_grad()
        return live

    trunk = run(lambda: [compute_entry_states(model, piece)])
    chunked = run(lambda: compute_logprobs(model, piece, batch.entries, chunk=rows * vocabulary))
    kept = run(lambda: compute_logprobs(model, piece, batch.entries, chunk=10**9))
    chunk, of_head = rows * vocabulary * 4, 3 * vocabulary * 16 * 4  # the head's gradient, in the making and made
    assert kept.largest >= entries * vocabulary * 4
    assert chunked.peak < trunk.peak + 6 * chunk + of_head
    assert kept.peak > trunk.peak + 4 * entries * vocabulary * 4


def test_computing_blocks_again_changes_no_bit_and_keeps_less(folder, episodes):
    plain, again = learner(folder), learner(folder, gradient_checkpointing=True)
    samples = episodes()
    expected, _ = gradients(plain, credited(plain, samples))
    found, _ = gradients(again, credited(again, samples))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    (piece,) = pack(credited(plain, samples), 1000)
    left = []
    for way in (Way(), Way(recompute=True)):
        with Live() as live:
            out = compute_logprobs(plain.model, piece, credited(plain, samples).entries, way=way)
        left.append(live.now)
        del out
    assert left[1] < left[0] / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning")  # the compiler's own
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_have_the_gradients_of_plain_ones(folder, episodes, recompute):
    """Of pieces of several sizes, without compiling again for each."""
    plain, compiled = learner(folder), learner(folder)
    compiled.way = Way(recompute=recompute, compile=True)
    samples = episodes()
    for part in (samples, samples[:2]):
        expected, _ = gradients(plain, credited(plain, part))
        found, _ = gradients(compiled, credited(compiled, part))
        assert all(torch.allclose(found[n], gradient, atol=1e-5) for n, gradient in expected.items())
        assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    assert not any(module.training for module in compiled.model.modules())


def test_an_engine_never_sees_that_blocks_are_computed_again(folder, episodes):
    """It runs the same model with keys of its own, which blocks drop when they are computed again."""
    again = learner(folder, gradient_checkpointing=True)
    again.update(credited(again, episodes()))
    assert not any(module.training for module in again.model.modules())
    cache = again.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    assert cache.get_seq_length() == 3


def test_greedy_turns_are_read_at_temperature_one(folder, episodes):
    taught = learner(folder)
    batch = credited(taught, episodes())
    (piece,) = pack(batch, 1000)
    plain = compute_logprobs(taught.model, piece, batch.entries)[0].detach()
    batch.entries.temperature[:] = 0.0
    assert torch.equal(compute_logprobs(taught.model, piece, batch.entries)[0], plain)
    assert np.isfinite(plain.numpy()).all()
