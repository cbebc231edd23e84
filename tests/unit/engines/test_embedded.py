"""The embedded engine's core against plain Hugging Face, and against itself in other company."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.embedded.sampler import sample, truncate
from strop.errors import ContextOverflow, EngineError
from strop.types import Sampling

VOCABULARY = 97


@pytest.fixture(scope="module", params=[4, 2], ids=["mha", "gqa"])
def model(request: pytest.FixtureRequest) -> Any:
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
    )
    built: Any = LlamaForCausalLM(config).eval()
    built.set_attn_implementation("eager")
    return built


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 70))] for _ in range(24)]


def play(
    model: Any,
    prompts: list[list[int]],
    *,
    deterministic: bool = True,
    together: int = 99,
    temperature: float = 1.0,
    order: list[int] | None = None,
) -> dict[int, list[Chunk]]:
    """Every prompt's chunks, with at most `together` requests at once."""
    config = EngineConfig(max_sequences=16, prefill_chunk=32, deterministic=deterministic)
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
            assert isinstance(chunk, Chunk)
            got[i].append(chunk)
            live -= chunk.finish is not None
    return got


def stepped(core: Core) -> list[Chunk]:
    return [chunk for _, chunk in core.step() if isinstance(chunk, Chunk)]


def answer(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for c in chunks for i in c.ids], [p for c in chunks for p in c.logprobs]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(
    model: Any, prompts: list[list[int]], deterministic: bool, temperature: float
) -> None:
    got = play(model, prompts, deterministic=deterministic, temperature=temperature)
    for i, prompt in enumerate(prompts):
        ids, logprobs = answer(got[i])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
        plain = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
        assert torch.allclose(plain, torch.tensor(logprobs), atol=1e-4, rtol=0)


def test_greedy_equals_generate(model: Any, prompts: list[list[int]]) -> None:
    got = play(model, prompts, temperature=0.0)
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        ids = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
        assert answer(got[i])[0] == ids[0, len(prompt) :].tolist()[: 6 + i % 7]


def test_deterministic_mode_gives_the_same_bits_in_any_company(model: Any, prompts: list[list[int]]) -> None:
    alone = play(model, prompts, together=1)
    assert play(model, prompts, together=16) == alone
    assert play(model, prompts, together=5, order=list(reversed(range(len(prompts))))) == alone


def test_seeds_fix_the_draw_and_differ(model: Any) -> None:
    prompt = [5, 6, 7]
    answers = [answer(play(model, [prompt] * 8)[i])[0] for i in range(8)]
    assert len({tuple(a) for a in answers}) > 1
    assert answers == [answer(play(model, [prompt] * 8, together=3)[i])[0] for i in range(8)]


@dataclass
class Drawer:
    sampling: Sampling
    stream: np.random.Generator = field(default_factory=lambda: np.random.Generator(np.random.Philox(key=1)))
    ids: list[int] = field(default_factory=list)
    num_prompt: int = 0
    allowed: None = None


def draws(logits: torch.Tensor, sampling: Sampling, count: int, *, precise: bool = False) -> list[tuple[int, float]]:
    """`count` draws from one row's logits."""
    ids, logprobs = sample(logits.expand(count, -1), [drawer := Drawer(sampling)] * count, precise=precise)
    assert len(ids) == len(logprobs) == count
    assert drawer.sampling is sampling
    return list(zip(ids, logprobs, strict=True))


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("vocabulary", [4, 256, 700, 5000])
def test_draws_follow_the_distribution(vocabulary: int, precise: bool) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(1, vocabulary) * 3
    shares = logits.softmax(-1)[0].numpy()
    found = np.bincount([id for id, _ in draws(logits, Sampling(), 20_000, precise=precise)], minlength=vocabulary)
    spread = np.sqrt(shares * (1 - shares) / 20_000)
    assert (np.abs(found / 20_000 - shares) < 5 * spread + 1e-3).all()


def test_a_cut_draws_nothing_that_was_cut_and_tells_the_logprob_of_what_is_left() -> None:
    shares = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    for sampling, kept in [
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_p=0.9), {0, 1, 3}),
        (Sampling(min_p=0.5), {1, 3}),
        (Sampling(top_k=3, top_p=0.6), {1, 3}),  # top-p of what top-k left: 0.5 / 0.95 is not enough
    ]:
        whole = sum(float(shares[0, id]) for id in kept)
        found = dict(draws(shares.log(), sampling, 400))
        assert set(found) == kept
        for id, logprob in found.items():
            assert logprob == pytest.approx(np.log(float(shares[0, id]) / whole), abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.95), Sampling(min_p=1e-4), Sampling(top_k=3000, top_p=0.99)])
def test_a_cut_that_keeps_many_is_the_same_as_a_cut_of_the_whole(sampling: Sampling) -> None:
    torch.manual_seed(0)
    logprobs = (torch.randn(3, 4000) * 0.5).log_softmax(-1)  # flat: far more tokens stay than are looked at first
    mine = truncate(logprobs.clone(), [sampling] * 3)
    warpers: Any = LogitsProcessorList()
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    wanted = warpers(torch.empty(3, 0, dtype=torch.long), logprobs.clone()).log_softmax(-1)
    assert (mine.isfinite().sum(-1) > 1024).all()
    # A token whose share decides by a rounding error whether the limit is reached may go either way.
    assert (mine.isfinite() != wanted.isfinite()).sum() <= 3
    both = mine.isfinite() & wanted.isfinite()
    assert torch.allclose(mine[both], wanted[both], atol=1e-5)


def test_rows_with_every_kind_of_sampling_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300) * 2
    kinds = [
        Sampling(),
        Sampling(temperature=0.0, top_k=1),
        Sampling(top_k=4, temperature=0.5),
        Sampling(repetition_penalty=1.3, presence_penalty=0.5),
        Sampling(temperature=2.0),
    ]

    def drawers() -> list[Drawer]:
        return [Drawer(s, ids=[1, 2, 3, 2], num_prompt=2) for s in kinds]

    together = sample(logits, drawers())
    alone = [sample(logits[i : i + 1], [drawer]) for i, drawer in enumerate(drawers())]
    assert together[0] == [ids[0] for ids, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-6)


def test_stop_ids_end_an_answer_and_belong_to_it(model: Any) -> None:
    core = Core(model, EngineConfig(max_sequences=2, prefill_chunk=8), context=64)
    greedy = Sampling(temperature=0.0, max_tokens=20)
    core.add(0, [1, 2, 3], greedy, [])
    free = [chunk for _ in range(20) for chunk in stepped(core)]
    stop = free[3].ids[0]
    first = next(k for k, chunk in enumerate(free) if chunk.ids[0] == stop)
    core.add(1, [1, 2, 3], greedy, [stop])
    stopped = [chunk for _ in range(first + 1) for chunk in stepped(core)]
    assert stopped[-1].finish == "stop"
    assert stopped[-1].ids == [stop]
    assert free[-1].finish == "length"
    assert not core.busy


def test_an_answer_ends_where_the_context_does(model: Any) -> None:
    core = Core(model, EngineConfig(max_sequences=2, prefill_chunk=8), context=16)
    core.add(0, [1] * 13, Sampling(max_tokens=50), [])
    chunks = []
    while core.busy:
        chunks += stepped(core)
    assert len(chunks) == 3  # 13 + 3 = 16
    assert chunks[-1].finish == "length"


def test_what_cannot_be_served_is_refused(model: Any) -> None:
    core = Core(model, EngineConfig(max_sequences=2, prefill_chunk=8), context=16)
    with pytest.raises(ContextOverflow, match="16"):
        core.add(0, [1] * 16, Sampling(), [])
    with pytest.raises(EngineError, match="empty"):
        core.add(0, [], Sampling(), [])
    with pytest.raises(EngineError, match="vocabulary"):
        core.add(0, [VOCABULARY], Sampling(), [])
    assert not core.busy


def test_cancelled_requests_give_their_slot_back(model: Any) -> None:
    core = Core(model, EngineConfig(max_sequences=2, prefill_chunk=8), context=64)
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
    assert core.slots.free == [0, 1]


def test_a_new_version_is_on_the_tokens_sampled_after_it(model: Any) -> None:
    core = Core(model, EngineConfig(max_sequences=2, prefill_chunk=8), context=64)
    core.add(0, [1, 2], Sampling(max_tokens=4), [])
    core.step()
    core.load("1.1")
    assert [chunk.version for _ in range(3) for chunk in stepped(core)] == ["1.1"] * 3
