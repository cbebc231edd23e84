"""Checks that any engine agrees with the plain Hugging Face model whose weights it serves.

    await agree(engine, model)                 everything below
    await agree(engine, model, Limits(...))    for an engine with other arithmetic: bf16, a GPU

Every sampled token's logprob is computed again from a forward pass over the whole sequence, one sequence at a time, and
from Hugging Face's own logits processors; nothing is shared with the engine but the weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from strop.engines.base import Engine
from strop.types import Sampling

Prompt = list[int]


@dataclass(frozen=True)
class Limits:
    """How far logprobs may lie apart: at most, and on average. `ties`: greedy choices whose logits are nearer than this
    may go either way."""

    most: float = 1e-4
    mean: float = 1e-5
    ties: float = 1e-4


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    sampling: Sampling
    ids: list[int]
    logprobs: list[float]
    versions: list[str]
    finish: str | None


async def ask(engine: Engine, prompt: Prompt, sampling: Sampling, stop_ids: Sequence[int] = ()) -> Answer:
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    finish = None
    async for chunk in engine.generate(prompt, sampling, stop_ids=stop_ids):
        assert finish is None
        assert len(chunk.ids) == len(chunk.logprobs)
        ids += chunk.ids
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.ids)
        finish = chunk.finish
    assert finish is not None
    return Answer(prompt, sampling, ids, logprobs, versions, finish)


async def ask_all(engine: Engine, asked: Sequence[tuple[Prompt, Sampling]]) -> list[Answer]:
    return await asyncio.gather(*(ask(engine, prompt, sampling) for prompt, sampling in asked))


# -- the reference -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_logits(model: Any, answer: Answer) -> Tensor:
    """[sampled, vocabulary], in float32."""
    ids = torch.tensor([answer.prompt + answer.ids], device=model.device)
    return model(ids, use_cache=False).logits[0, len(answer.prompt) - 1 : -1].float().cpu()


def distributions(logits: Tensor, answer: Answer) -> Tensor:
    """Logprobs of what was drawn from, [sampled, vocabulary]: penalties, then temperature, then cuts."""
    s = answer.sampling
    if not s.truncated and not s.penalised:
        return (logits / (s.temperature or 1.0)).log_softmax(-1)
    warpers: Any = LogitsProcessorList()
    if s.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k and s.temperature:
        warpers.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1.0 and s.temperature:
        warpers.append(TopPLogitsWarper(s.top_p))
    if s.min_p and s.temperature:
        warpers.append(MinPLogitsWarper(s.min_p))
    out: list[Tensor] = []
    for index, row in enumerate(logits):
        said = answer.ids[:index]
        context = torch.tensor([answer.prompt + said])
        scores = row[None].clone()
        if s.repetition_penalty != 1.0:
            again: Any = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)
            scores = again(context, scores)
        for id in set(said):
            scores[0, id] -= s.presence_penalty + s.frequency_penalty * said.count(id)
        out.append(warpers(context, scores)[0].log_softmax(-1))
    return torch.stack(out)


def off(model: Any, answer: Answer) -> Tensor:
    """How far each logprob the engine told lies from the reference's."""
    logprobs = distributions(plain_logits(model, answer), answer)
    wanted = logprobs[torch.arange(len(answer.ids)), answer.ids]
    return (wanted - torch.tensor(answer.logprobs)).abs()


def assert_agreement(model: Any, answers: Sequence[Answer], limits: Limits) -> None:
    apart = torch.cat([off(model, answer) for answer in answers])
    assert apart.isfinite().all(), "a token was drawn that the reference has cut"
    assert apart.max() <= limits.most, f"a logprob is {apart.max():.2e} from the plain forward pass's"
    assert apart.mean() <= limits.mean, f"logprobs are {apart.mean():.2e} from the plain forward pass's on average"


# -- the checks --------------------------------------------------------------------------------------------------------


def prompts(model: Any, count: int, longest: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    size = model.config.vocab_size
    return [[draw.randrange(size) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


async def alone_and_together(engine: Engine, model: Any, limits: Limits) -> None:
    """Answers of different lengths to prompts of different lengths: requests begin while others are in mid-answer."""
    asked = [
        (prompt, Sampling(temperature=(1.0, 0.7, 1.3)[i % 3], max_tokens=3 + i % 9, seed=i))
        for i, prompt in enumerate(prompts(model, 20, min(60, engine.context // 4)))
    ]
    answers = await ask_all(engine, asked)
    assert_agreement(model, answers, limits)
    assert_agreement(model, [await ask(engine, *one) for one in asked[:3]], limits)
    assert all(len(a.ids) == a.sampling.max_tokens and a.finish == "length" for a in answers)


async def conversations(engine: Engine, model: Any, limits: Limits) -> None:
    """Histories that grow, branch and come back: where the engine uses keys again, they must be the right ones."""
    histories = prompts(model, 6, 40, seed=1)
    extra = iter(prompts(model, 100, 9, seed=2))
    for turn in range(3):
        answers = await ask_all(engine, [(h, Sampling(max_tokens=6, seed=turn)) for h in histories])
        assert_agreement(model, answers, limits)
        histories = [a.prompt + a.ids + next(extra) for a in answers]
        histories[0] = answers[0].prompt[: len(answers[0].prompt) // 2 + 1] + next(extra)  # an edited history


async def groups(engine: Engine, model: Any, limits: Limits) -> None:
    """Members that share a prompt, and prompts that share a beginning, all at once."""
    (shared, other) = ([*p, *p, *p][:60] for p in prompts(model, 2, 60, seed=3))
    asked = [(shared, Sampling(max_tokens=5, seed=i)) for i in range(6)]
    asked += [([*other, *tail], Sampling(max_tokens=5, seed=9)) for tail in prompts(model, 6, 12, seed=4)]
    answers = await ask_all(engine, asked)
    assert_agreement(model, answers, limits)
    assert len({tuple(a.ids) for a in answers[:6]}) > 1, "members of a group with different seeds all said the same"


async def a_long_prompt_beside_short_ones(engine: Engine, model: Any, limits: Limits) -> None:
    length = engine.context * 3 // 4
    long = [id for p in prompts(model, 40, length, seed=5) for id in p][:length]
    asked = [(p, Sampling(max_tokens=12, seed=7)) for p in prompts(model, 4, 12, seed=6)]
    assert_agreement(model, await ask_all(engine, [*asked, (long, Sampling(max_tokens=4, seed=8)), *asked]), limits)


async def greedy(engine: Engine, model: Any, limits: Limits) -> None:
    asked = [(p, Sampling(temperature=0.0, max_tokens=8)) for p in prompts(model, 6, 40, seed=7)]
    answers = await ask_all(engine, asked)
    assert_agreement(model, answers, limits)
    for answer in answers:
        tokens = torch.tensor([answer.prompt], device=model.device)
        wanted = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, eos_token_id=None
        )[0, tokens.shape[1] :].tolist()
        for index, (id, other) in enumerate(zip(answer.ids, wanted, strict=True)):
            if id != other:
                row = plain_logits(model, answer)[index]
                assert (row[id] - row[other]).abs() <= limits.ties, "a greedy answer is not what generate says"
                break  # behind a tie the two go different ways


async def every_setting(engine: Engine, model: Any, limits: Limits) -> None:
    """Penalties and cuts, against Hugging Face's processors."""
    settings = [
        Sampling(top_k=5),
        Sampling(top_p=0.7),
        Sampling(min_p=0.1),
        Sampling(top_k=20, top_p=0.8, min_p=0.02, temperature=0.8),
        Sampling(presence_penalty=0.9, frequency_penalty=0.6),
        Sampling(repetition_penalty=1.4),
        Sampling(repetition_penalty=1.2, presence_penalty=-0.4, frequency_penalty=0.3, top_p=0.9, temperature=1.2),
        Sampling(temperature=0.0, repetition_penalty=1.5, top_k=3),
    ]
    given = prompts(model, 3, 30, seed=8)
    asked = [(given[i % 3], replace(s, max_tokens=12, seed=i)) for i, s in enumerate(settings * 2)]
    assert_agreement(model, await ask_all(engine, asked), limits)


async def seeds(engine: Engine, model: Any) -> None:
    prompt = prompts(model, 1, 20, seed=9)[0]
    drawn = [(await ask(engine, prompt, Sampling(max_tokens=8, seed=seed))).ids for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn}) > 1


async def stop_ids(engine: Engine, model: Any) -> None:
    prompt, sampling = prompts(model, 1, 20, seed=10)[0], Sampling(max_tokens=8, seed=1)
    free = await ask(engine, prompt, sampling)
    stopped = await ask(engine, prompt, sampling, [free.ids[3]])
    assert stopped.ids == free.ids[: free.ids.index(free.ids[3]) + 1]
    assert stopped.finish == "stop"


async def cancelling(engine: Engine, model: Any) -> None:
    """Iterators closed early, in every state a request can be in; the engine goes on."""

    async def leave(prompt: Prompt, after: int) -> None:
        stream = engine.generate(prompt, Sampling(max_tokens=50), stop_ids=())
        try:
            async with asyncio.timeout(0.02 if after == 0 else 60):
                for _ in range(max(after, 1)):
                    await anext(stream)
        except TimeoutError:
            pass
        finally:
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    await asyncio.gather(*(leave(p, i % 4) for i, p in enumerate(prompts(model, 24, 30, seed=11))))
    assert len((await ask(engine, [1, 2, 3], Sampling(max_tokens=4, seed=1))).ids) == 4


FP32 = Limits()


async def agree(engine: Engine, model: Any, limits: Limits = FP32) -> None:
    for check in (
        alone_and_together,
        conversations,
        groups,
        a_long_prompt_beside_short_ones,
        greedy,
        every_setting,
    ):
        await check(engine, model, limits)
    await seeds(engine, model)
    await stop_ids(engine, model)
    await cancelling(engine, model)
