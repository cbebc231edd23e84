"""The embedded engine agrees with plain Hugging Face, whatever it does to be fast."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded import core as core_module
from strop.engines.embedded import linears
from strop.engines.embedded.core import Core
from strop.engines.embedded.engine import Arrival, Embedded
from strop.errors import ContextOverflow, EngineError, ModelError, StropError
from strop.learner.model import load
from strop.models.names import resolve
from strop.types import Sampling
from tests.parity.agreement import Answer, Limits, agree, assert_agreement, prompts

VOCABULARY = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # far from uniform: a wrong position or mask shows in every logprob
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),  # query heads that share key heads
    "qwen3": Qwen3Config(**SMALL, head_dim=16),  # norms on queries and keys, heads wider than their share
    "granite": GraniteConfig(**SMALL, logits_scaling=1.7, attention_multiplier=0.3),  # logits scaled behind the head
    "gpt2": GPT2Config(  # learned absolute positions, no rotation, biases
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    ),
}


@pytest.fixture(autouse=True)
def _as_with_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid out and caches grow, which models and contexts as small as these would not need."""
    monkeypatch.setattr(linears, "SMALLEST", 1)
    monkeypatch.setattr(core_module, "BEGIN", 16)


def tiny(config: PreTrainedConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


class Beside:
    """A link to a core in this very process: steps are taken between the event loop's other business."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._ids = itertools.count()
        self._streams: dict[int, asyncio.Queue[Arrival]] = {}

    @property
    def context(self) -> int:
        return self.core.context

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], to: asyncio.Queue[Arrival]
    ) -> int:
        id = next(self._ids)
        try:
            self.core.add(id, prompt_ids, sampling, stop_ids)
            self._streams[id] = to
        except StropError as error:
            to.put_nowait(error)
        return id

    def cancel(self, id: int) -> None:
        self._streams.pop(id, None)
        self.core.cancel(id)

    async def wait_until_idle(self) -> None:
        raise AssertionError("nothing here pauses")

    async def load(self, version: str) -> None:
        self.core.load(version)

    async def work(self) -> None:
        while True:
            try:
                for id, arrival in self.core.step() if self.core.busy else ():
                    self._streams[id].put_nowait(arrival)
            except Exception as error:
                for stream in self._streams.values():
                    stream.put_nowait(EngineError(f"the step failed: {error!r}"))
                raise
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(core: Core) -> AsyncIterator[Embedded]:
    link = Beside(core)
    work = asyncio.create_task(link.work())
    try:
        yield Embedded(link)
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def play(core: Core, asked: dict[int, tuple[list[int], Sampling]]) -> dict[int, list[Chunk]]:
    for id, (prompt, sampling) in asked.items():
        core.add(id, prompt, sampling, [])
    return finish(core, {id: [] for id in asked})


def finish(core: Core, got: dict[int, list[Chunk]]) -> dict[int, list[Chunk]]:
    while core.busy:
        for id, chunk in core.step():
            assert isinstance(chunk, Chunk)
            got[id].append(chunk)
    return got


def answer(prompt: list[int], sampling: Sampling, chunks: Sequence[Chunk]) -> Answer:
    return Answer(
        prompt,
        sampling,
        [i for c in chunks for i in c.ids],
        [p for c in chunks for p in c.logprobs],
        [c.version for c in chunks],
        chunks[-1].finish,
    )


# -- everything, for several architectures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [*((name, False) for name in (*CONFIGS, "strop/nano")), ("llama", True), ("gpt2", True)],
)
async def test_it_agrees_with_the_plain_model(name: str, deterministic: bool) -> None:
    model = load(resolve(name)) if name == "strop/nano" else tiny(CONFIGS[name])
    # Few slots and small chunks: requests wait, prompts come in pieces, keys are used again and thrown out.
    core = Core(model, EngineConfig(max_sequences=8, prefill_chunk=16, deterministic=deterministic), context=160)
    async with serving(core) as engine:
        await agree(engine, model)
    assert len(core.slots.free) == 8
    assert not core.busy


def test_a_model_that_does_more_than_full_attention_is_refused() -> None:
    config = Gemma2Config(**SMALL, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0)
    with pytest.raises(ModelError, match="full attention"):
        Core(tiny(config), EngineConfig(max_sequences=2), context=64)


# -- new weights in mid-flight -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_every_token_is_reproduced_by_the_weights_of_its_version(deterministic: bool) -> None:
    versions = {name: tiny(CONFIGS["llama"], seed) for seed, name in enumerate(("1.0", "1.1", "1.2"))}
    served = tiny(CONFIGS["llama"], 0)
    core = Core(served, EngineConfig(max_sequences=4, prefill_chunk=8, deterministic=deterministic), context=128)
    asked = {
        i: (p, Sampling(max_tokens=12 + i, temperature=0.9, seed=i))
        for i, p in enumerate(prompts(served, 9, 50, seed=1))
    }
    got: dict[int, list[Chunk]] = {i: [] for i in asked}
    for id, (prompt, sampling) in asked.items():
        core.add(id, prompt, sampling, [])
    for steps, name in ((6, "1.1"), (9, "1.2")):
        for _ in range(steps):
            for id, chunk in core.step():
                assert isinstance(chunk, Chunk)
                got[id].append(chunk)
        assert core.running
        served.load_state_dict(versions[name].state_dict())  # in place: the engine's tensors are these
        core.load(name)
    finish(core, got)
    answers = [answer(*asked[id], chunks) for id, chunks in got.items()]
    assert {v for a in answers for v in a.versions} == set(versions)
    assert any(len(set(a.versions)) > 1 for a in answers)
    for a in answers:
        assert a.versions == sorted(a.versions)
        logprobs = torch.tensor(a.logprobs)
        for name, model in versions.items():
            with torch.no_grad():
                logits = model(torch.tensor([a.prompt + a.ids])).logits[0, len(a.prompt) - 1 : -1] / 0.9
            plain = logits.log_softmax(-1)[torch.arange(len(a.ids)), a.ids]
            mine = torch.tensor([v == name for v in a.versions])
            assert ((plain - logprobs).abs() <= 1e-4)[mine].all()
            assert not mine.all() or not ((plain - logprobs).abs() <= 1e-4)[~mine].any()


def test_the_model_itself_is_left_as_it_was() -> None:
    """What the engine lays out for its passes must never reach the learner, which has gradients to follow."""
    served = tiny(CONFIGS["llama"])
    core = Core(served, EngineConfig(max_sequences=4), context=128)
    play(core, {i: ([1, 2, 3, i], Sampling(max_tokens=4)) for i in range(4)})
    assert not torch.backends.mkl.is_available() or core.passes._linears._forwards  # pyright: ignore
    assert all("forward" not in vars(module) for module in served.modules())
    assert served(torch.tensor([[1, 2, 3]])).logits.requires_grad


def test_an_agent_may_leave_in_the_middle_of_a_prompt_that_made_the_cache_grow() -> None:
    served = tiny(CONFIGS["llama"])
    core = Core(served, EngineConfig(max_sequences=2, prefill_chunk=8), context=128)
    core.add(0, [7] * 100, Sampling(max_tokens=4), [])
    for _ in range(5):
        core.step()
    assert core.cache.width > 16
    core.cancel(0)
    asked = {1: ([7] * 20, Sampling(max_tokens=4, seed=1))}
    assert_agreement(served, [answer(*asked[1], play(core, asked)[1])], Limits())


@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_deterministic_mode_takes_any_chunk_and_positions_that_end_early(chunk: int) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=100, eos_token_id=None)
    served = tiny(config)
    core = Core(served, EngineConfig(max_sequences=2, prefill_chunk=chunk, deterministic=True), context=100)
    asked = {0: ([5] * 40, Sampling(max_tokens=59, seed=1))}
    assert_agreement(served, [answer(*asked[0], play(core, asked)[0])], Limits())


def test_positions_that_depend_on_the_neighbours_are_refused() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    parameters = {**factors, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    model = tiny(LlamaConfig(**{**SMALL, "rope_parameters": parameters}))
    with pytest.raises(ModelError, match="longrope"):
        Core(model, EngineConfig(max_sequences=2), context=64)


def test_keys_of_an_older_version_are_not_used_again() -> None:
    served, other = tiny(CONFIGS["llama"], 0), tiny(CONFIGS["llama"], 1)
    core = Core(served, EngineConfig(max_sequences=4), context=128)
    prompt, sampling = [5] * 40, Sampling(max_tokens=4, seed=1)
    play(core, {0: (prompt, sampling)})
    served.load_state_dict(other.state_dict())
    core.load("1.1")
    got = play(core, {1: (prompt, sampling)})
    assert_agreement(other, [answer(prompt, sampling, got[1])], Limits())


# -- what it need not compute again ------------------------------------------------------------------------------------


def tokens_run(core: Core) -> list[int]:
    """Counts the tokens of every pass from now on."""
    passes, counts = core.passes.run, list[int]()

    def run(pieces: Any) -> Any:
        counts.append(sum(len(piece.ids) for piece in pieces))
        return passes(pieces)

    core.passes.run = run  # pyright: ignore[reportAttributeAccessIssue]
    return counts


def test_a_conversation_is_run_once_however_many_turns_it_has() -> None:
    model = tiny(CONFIGS["llama"])
    core = Core(model, EngineConfig(max_sequences=4), context=256)
    counts, history = tokens_run(core), list(range(30))
    for turn in range(5):
        got = play(core, {turn: (history, Sampling(max_tokens=6, seed=turn))})
        assert_agreement(model, [answer(history, Sampling(max_tokens=6), got[turn])], Limits())
        history = history + [i for c in got[turn] for i in c.ids] + [turn, 7, 8]
    assert sum(counts) == len(history) - 4  # less the last answer's last token and the message nobody answered


def test_a_group_runs_its_prompt_once() -> None:
    model = tiny(CONFIGS["llama"])
    core = Core(model, EngineConfig(max_sequences=8, prefill_chunk=32), context=256)
    counts, prompt = tokens_run(core), [i % VOCABULARY for i in range(100)]
    asked = {i: (prompt, Sampling(max_tokens=5, seed=i)) for i in range(8)}
    got = play(core, asked)
    assert_agreement(model, [answer(*asked[i], got[i]) for i in asked], Limits())
    assert sum(counts) == 100 + 7 + 8 * 4  # the prompt, its last token for each other member, the answers
    assert len({tuple(i for c in got[m] for i in c.ids) for m in got}) > 1


def test_a_conversation_in_mid_answer_lends_its_keys_and_keeps_them() -> None:
    model = tiny(CONFIGS["llama"])
    core = Core(model, EngineConfig(max_sequences=2), context=256)
    prompt, sampling = list(range(60)), Sampling(max_tokens=20, seed=1)
    core.add(0, prompt, sampling, [])
    got: dict[int, list[Chunk]] = {0: [], 1: []}
    for _ in range(4):
        got[0] += [c for _, c in core.step() if isinstance(c, Chunk)]
    branch = [*prompt[:50], 99, 98, 97]
    core.add(1, branch, sampling, [])
    finish(core, got)
    assert_agreement(model, [answer(prompt, sampling, got[0]), answer(branch, sampling, got[1])], Limits())


def test_running_sequences_get_tokens_while_a_long_prompt_comes_in() -> None:
    model = tiny(CONFIGS["llama"])
    core = Core(model, EngineConfig(max_sequences=4, prefill_chunk=16), context=512)
    core.add(0, [1, 2, 3], Sampling(max_tokens=40, seed=1), [])
    core.step()
    core.add(1, [i % VOCABULARY for i in range(300)], Sampling(max_tokens=2, seed=1), [])
    counts, waited = tokens_run(core), 0
    while 1 not in (served := [id for id, _ in core.step()]):
        assert served == [0]
        waited += 1
    assert waited == 300 // 16
    assert max(counts) <= 16 + 1


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_the_cache_never_outgrows_its_memory_and_everybody_is_served() -> None:
    model = tiny(CONFIGS["llama"])
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width of a head, bytes
    memory = 3.5 * 128 * per_token / 2**30
    core = Core(model, EngineConfig(max_sequences=16, kv_cache_gib=memory), context=128)
    asked = {i: (p, Sampling(max_tokens=20, seed=i)) for i, p in enumerate(prompts(model, 20, 100, seed=2))}
    for id, (prompt, sampling) in asked.items():
        core.add(id, prompt, sampling, [])
    got: dict[int, list[Chunk]] = {i: [] for i in asked}
    while core.busy:
        for id, chunk in core.step():
            assert isinstance(chunk, Chunk)
            got[id].append(chunk)
        assert len(core.running) <= 3
        assert core.cache.bytes <= memory * 2**30
    assert_agreement(model, [answer(*asked[i], got[i]) for i in asked], Limits())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_that_the_memory_can_never_hold_is_refused(deterministic: bool) -> None:
    memory = 100 * 256 / 2**30
    config = EngineConfig(max_sequences=16, kv_cache_gib=memory, prefill_chunk=8, deterministic=deterministic)
    core = Core(tiny(CONFIGS["llama"]), config, context=512)
    assert core.cache.bytes <= 100 * 256
    with pytest.raises(ContextOverflow, match=r"engine\.kv_cache_gib"):
        core.add(0, [1] * 100, Sampling(), [])
    with pytest.raises(EngineError, match="one sequence"):
        Core(tiny(CONFIGS["llama"]), EngineConfig(kv_cache_gib=1e-9), context=512)


def test_a_storm_of_cancellations_leaves_every_slot_free_and_nothing_behind() -> None:
    model = tiny(CONFIGS["llama"])
    core = Core(model, EngineConfig(max_sequences=4, prefill_chunk=8), context=128)
    core.cache.reach(core.context)
    draw, size = random.Random(0), core.cache.bytes
    alive: set[int] = set()
    for id in range(1000):
        core.add(id, [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 40))], Sampling(max_tokens=30), [])
        alive.add(id)
        if id % 3 == 0:
            alive -= {done for done, chunk in core.step() if isinstance(chunk, Chunk) and chunk.finish}
        while len(alive) > 12:
            core.cancel(leaving := draw.choice(sorted(alive)))
            alive.remove(leaving)
    for id in alive:
        core.cancel(id)
    assert not core.busy
    assert len(core.slots.free) == 4
    assert core.cache.bytes == size
    prompt, sampling = [3, 1, 4, 1, 5], Sampling(max_tokens=10, seed=1)
    assert_agreement(model, [answer(prompt, sampling, play(core, {0: (prompt, sampling)})[0])], Limits())


def test_logits_that_are_not_numbers_end_their_request_and_no_other() -> None:
    model = tiny(CONFIGS["llama"])
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = torch.nan
    core = Core(model, EngineConfig(max_sequences=2, prefill_chunk=8), context=128)
    sampling = Sampling(max_tokens=12, seed=1, repetition_penalty=1.0)
    core.add(0, [1, 2, 77, *range(30)], sampling, [])
    core.add(1, [5, 6], sampling, [])
    core.add(2, [8, 9], sampling, [])  # gets the slot that held the broken keys
    got: dict[int, list[Chunk | EngineError]] = {0: [], 1: [], 2: []}
    while core.busy:
        for id, arrival in core.step():
            got[id].append(arrival)
    assert len(got[0]) == 1
    assert isinstance(got[0][0], EngineError)
    assert "request 0" in str(got[0][0])
    for id, prompt in ((1, [5, 6]), (2, [8, 9])):
        chunks = [c for c in got[id] if isinstance(c, Chunk)]
        assert len(chunks) == 12
        assert_agreement(model, [answer(prompt, sampling, chunks)], Limits())
