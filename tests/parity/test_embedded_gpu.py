"""The embedded engine on a GPU agrees with plain Hugging Face: in float32 nearly, in bfloat16 as well as that can.

How well that is, is measured first: how far a plain forward pass in bfloat16 lies from one of the same weights in
float32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.embedded.graphs import Graphs
from strop.types import Sampling
from tests.parity.agreement import Answer, Limits, agree, assert_agreement, off, prompts
from tests.parity.test_embedded_agreement import CONFIGS, answer, finish, play, serving, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


def pair(name: str, seed: int = 0) -> tuple[Any, Any]:
    """The same weights in bfloat16 and float32."""
    half = tiny(CONFIGS[name], seed).to("cuda", torch.bfloat16)
    return half, copy.deepcopy(half).float()


@torch.no_grad()
def noise(half: Any, whole: Any) -> Limits:
    """How far two passes in bfloat16 may lie from float32: this one, and an engine's that sums in another order."""
    apart: list[torch.Tensor] = []
    for prompt in prompts(half, 40, 100, seed=11):
        ids = torch.tensor([prompt], device="cuda")
        logprobs = half(ids).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        if len(prompt) > 1:
            apart.append(off(whole, Answer(prompt[:1], Sampling(), prompt[1:], logprobs.tolist(), [], None)))
    every = torch.cat(apart)
    return Limits(most=3 * float(every.max()), mean=1.5 * float(every.mean()), ties=3 * float(every.max()))


@pytest.mark.parametrize("name", CONFIGS)
async def test_it_agrees_in_float32(name: str) -> None:
    model = tiny(CONFIGS[name]).to("cuda")
    core = Core(model, EngineConfig(max_sequences=8, prefill_chunk=16), context=160)
    async with serving(core) as engine:
        await agree(engine, model, Limits(most=1e-3, mean=1e-4, ties=1e-3))


@pytest.mark.parametrize("name", CONFIGS)
async def test_it_agrees_in_bfloat16(name: str) -> None:
    half, whole = pair(name)
    core = Core(half, EngineConfig(max_sequences=8, prefill_chunk=16), context=160)
    async with serving(core) as engine:
        await agree(engine, whole, noise(half, whole))


def test_recorded_passes_follow_a_cache_that_grows_and_weights_that_change() -> None:
    half, whole = pair("llama")
    core = Core(half, EngineConfig(max_sequences=4), context=512)
    core.cache.width = 32  # as if it had begun that narrow
    for tensors in (core.cache.keys, core.cache.values):
        tensors[:] = [tensor[:, :32].contiguous() for tensor in tensors]
    asked = {i: (p, Sampling(max_tokens=60, seed=i)) for i, p in enumerate(prompts(half, 4, 12))}
    answers = [answer(*asked[id], chunks) for id, chunks in play(core, asked).items()]
    assert core.cache.width > 32
    assert_agreement(whole, answers, noise(half, whole))
    graphs = core.passes._graphs
    assert graphs._recorded
    assert not graphs._refused
    other_half, other_whole = pair("llama", seed=1)
    got: dict[int, list[Chunk]] = {id: [] for id in asked}
    for id, (prompt, sampling) in asked.items():
        core.add(id, prompt, sampling, [])
    for _ in range(20):
        for id, chunk in core.step():
            assert isinstance(chunk, Chunk)
            got[id].append(chunk)
    recorded = dict(graphs._recorded)
    half.load_state_dict(other_half.state_dict())
    core.load("1.1")
    finish(core, got)
    assert all(graphs._recorded[size] is one for size, one in recorded.items()), "they only changed in place"
    for id, chunks in got.items():
        a = answer(*asked[id], chunks)
        old = a.versions.index("1.1")
        late = Answer([*a.prompt, *a.ids[:old]], a.sampling, a.ids[old:], a.logprobs[old:], a.versions[old:], a.finish)
        assert_agreement(other_whole, [late], noise(half, other_whole))
        assert float(off(whole, late).mean()) > 0.5, "the old weights would have done as well: this shows nothing"


@torch.no_grad()
def test_recordings_begin_anew_while_logits_of_old_ones_are_held() -> None:
    """Their memory pool is then neither free nor to be had again."""
    model = tiny(CONFIGS["llama"]).to("cuda")

    def read(_: object, ids: torch.Tensor) -> torch.Tensor:
        """A whole model makes its mask on the CPU, which cannot be recorded."""
        return model.lm_head(model.model.embed_tokens(ids))

    graphs, ids, held = Graphs(read, model), torch.tensor([[1, 2, 3]]), list[torch.Tensor]()
    for size in (10, 20, 30):  # the cache has moved
        held.append(graphs.run(3, [ids], beside=[torch.zeros(size * 2**20, device="cuda")]))
        assert not graphs._refused
        assert torch.allclose(held[-1], read(None, ids.to("cuda")), atol=1e-4)


def test_a_model_that_cannot_be_recorded_is_served_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    half, whole = pair("llama")
    inner = half.model.forward

    def waits(*args: Any, **more: Any) -> Any:
        more["input_ids"].max().item()  # asks the device for a number, which a recording cannot
        return inner(*args, **more)

    half.model.forward = waits
    core = Core(half, EngineConfig(max_sequences=4), context=128)
    asked = {i: (p, Sampling(max_tokens=9, seed=i)) for i, p in enumerate(prompts(half, 4, 12))}
    answers = [answer(*asked[id], chunks) for id, chunks in play(core, asked).items()]
    assert_agreement(whole, answers, noise(half, whole))
    assert "cannot be recorded" in caplog.text
    torch.randn(1, device="cuda")  # refused for good, had the recording's end been left open
    assert grown_by_two_streams(size := 32 * 2**20) < 3 * size


def grown_by_two_streams(size: int, times: int = 20) -> int:
    """Bytes reserved for one tensor that two streams use, made again and again."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, beside = torch.cuda.memory_reserved(), torch.cuda.Stream()
    for _ in range(times):
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(beside):
            tensor.add_(1)
        tensor.record_stream(beside)
        del tensor
        torch.cuda.synchronize()
    return torch.cuda.memory_reserved() - before
