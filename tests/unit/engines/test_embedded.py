"""The embedded engine's core against plain Hugging Face, and against itself in other company."""

import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.embedded.sampler import sample
from strop.errors import ContextOverflow, EngineError
from strop.types import Sampling

VOCABULARY = 97


@pytest.fixture(scope="module", params=[4, 2], ids=["mha", "gqa"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=request.param,
        initializer_range=0.4,  # far from uniform: a wrong position or mask shows in every logprob
        eos_token_id=None,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 70))] for _ in range(24)]


def play(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    *,
    deterministic: bool = True,
    together: int = 99,
    temperature: float = 1.0,
    order: list[int] | None = None,
) -> dict[int, list[Chunk]]:
    """Every prompt's chunks, with at most `together` requests at once."""
    config = EngineConfig(rows=16, prefill_chunk=32, deterministic=deterministic)
    core = Core(model, config, context=128)
    todo = list(order or range(len(prompts)))
    got: dict[int, list[Chunk]] = {i: [] for i in todo}
    live = 0
    while todo or core.busy:
        while todo and live < together:
            i = todo.pop(0)
            # Answers of different lengths: requests begin while others are in the middle of theirs.
            core.add(i, prompts[i], Sampling(temperature=temperature, max_tokens=6 + i % 7, seed=i), [])
            live += 1
        for i, chunk in core.step():
            got[i].append(chunk)
            live -= chunk.finish is not None
    return got


def answer(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for c in chunks for i in c.ids], [p for c in chunks for p in c.logprobs]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(
    model: LlamaForCausalLM, prompts: list[list[int]], deterministic: bool, temperature: float
) -> None:
    got = play(model, prompts, deterministic=deterministic, temperature=temperature)
    for i, prompt in enumerate(prompts):
        ids, logprobs = answer(got[i])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
        plain = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
        assert torch.allclose(plain, torch.tensor(logprobs), atol=1e-4, rtol=0)


def test_greedy_equals_generate(model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    got = play(model, prompts, temperature=0.0)
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        ids = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
        assert answer(got[i])[0] == ids[0, len(prompt) :].tolist()[: 6 + i % 7]


def test_deterministic_mode_gives_the_same_bits_in_any_company(
    model: LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    alone = play(model, prompts, together=1)
    assert play(model, prompts, together=16) == alone
    assert play(model, prompts, together=5, order=list(reversed(range(len(prompts))))) == alone


def test_seeds_fix_the_draw_and_differ(model: LlamaForCausalLM) -> None:
    prompt = [5, 6, 7]
    answers = [answer(play(model, [prompt] * 8)[i])[0] for i in range(8)]
    assert len({tuple(a) for a in answers}) > 1
    assert answers == [answer(play(model, [prompt] * 8, together=3)[i])[0] for i in range(8)]


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    stream = np.random.Generator(np.random.Philox(key=1))
    draws = [sample(logits, [Sampling()], [stream])[0][0] for _ in range(4000)]
    shares = np.bincount(draws, minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_truncation_never_draws_what_was_cut() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    stream = np.random.Generator(np.random.Philox(key=1))
    for sampling, kept in [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.9), {0, 1, 2}),
        (Sampling(min_p=0.5), {0, 1}),
    ]:
        assert {sample(logits, [sampling], [stream])[0][0] for _ in range(400)} == kept


def test_stop_ids_end_an_answer_and_belong_to_it(model: LlamaForCausalLM) -> None:
    core = Core(model, EngineConfig(rows=2, prefill_chunk=8), context=64)
    greedy = Sampling(temperature=0.0, max_tokens=20)
    core.add(0, [1, 2, 3], greedy, [])
    free = [chunk for _ in range(20) for _, chunk in core.step()]
    stop = free[3].ids[0]
    first = next(k for k, chunk in enumerate(free) if chunk.ids[0] == stop)
    core.add(1, [1, 2, 3], greedy, [stop])
    stopped = [chunk for _ in range(first + 1) for _, chunk in core.step()]
    assert stopped[-1].finish == "stop"
    assert stopped[-1].ids == [stop]
    assert free[-1].finish == "length"
    assert not core.busy


def test_an_answer_ends_where_the_context_does(model: LlamaForCausalLM) -> None:
    core = Core(model, EngineConfig(rows=2, prefill_chunk=8), context=16)
    core.add(0, [1] * 13, Sampling(max_tokens=50), [])
    chunks = []
    while core.busy:
        chunks += [chunk for _, chunk in core.step()]
    assert len(chunks) == 3  # 13 + 3 = 16
    assert chunks[-1].finish == "length"


def test_what_cannot_be_served_is_refused(model: LlamaForCausalLM) -> None:
    core = Core(model, EngineConfig(rows=2, prefill_chunk=8), context=16)
    with pytest.raises(ContextOverflow, match="16"):
        core.add(0, [1] * 16, Sampling(), [])
    with pytest.raises(EngineError, match="empty"):
        core.add(0, [], Sampling(), [])
    with pytest.raises(EngineError, match="vocabulary"):
        core.add(0, [VOCABULARY], Sampling(), [])
    assert not core.busy


def test_cancelled_requests_give_their_slot_back(model: LlamaForCausalLM) -> None:
    core = Core(model, EngineConfig(rows=2, prefill_chunk=8), context=64)
    for i in range(3):
        core.add(i, [1, 2], Sampling(max_tokens=50), [])
    core.step()
    assert set(core.running) == {0, 1}
    core.cancel(0)
    core.cancel(99)
    core.step()
    assert set(core.running) == {1, 2}
    core.cancel(1)
    core.cancel(2)
    assert not core.busy
    assert sorted(core.slots) == [0, 1]


def test_a_new_version_is_on_the_tokens_sampled_after_it(model: LlamaForCausalLM) -> None:
    core = Core(model, EngineConfig(rows=2, prefill_chunk=8), context=64)
    core.add(0, [1, 2], Sampling(max_tokens=4), [])
    core.step()
    core.version = "1.1"
    assert [chunk.version for _ in range(3) for _, chunk in core.step()] == ["1.1"] * 3
