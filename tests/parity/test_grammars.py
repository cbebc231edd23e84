"""What is learned from answers that had to follow a schema is what plain rows of stock Hugging Face make of them, in
float64, over the tokens that were allowed: logprobs, entropies and every gradient.

The other side shares no code with ours: which tokens were allowed is found by comparing strings.
"""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.config import EngineConfig
from strop.engines.embedded.core import Core
from strop.learner.logprobs import compute_logprobs
from strop.learner.masks import EntryMasks
from strop.learner.model import load
from strop.trajectory import Sample, assemble, pack
from strop.types import Rollout, Sampling, Task, Turn
from tests.parity.rows import unrounded
from tests.unit.models.test_grammar import ENDS, NANO, TEXTS, TOKENIZER, VOCABULARY, find_next, grammar_of

SCHEMAS = {
    "words": (['"ab"', '"abc"', '"a plan"'], {"enum": ["ab", "abc", "a plan"]}),
    "one": (['"abc"'], {"const": "abc"}),
    "bools": (["true", "false"], {"type": "boolean"}),
}
PROMPT = TOKENIZER.encode("What is 12 + 5?").ids


def draw_answer(texts: list[str], draw: random.Random) -> list[int]:
    said, ids = "", list[int]()
    while not ids or ids[-1] not in ENDS:
        ids.append(draw.choice(sorted(find_next(texts, said))))
        said += TEXTS[ids[-1]]
    return ids


def make_turn(number: int, ids: list[int], kind: str | None, temperature: float) -> Turn:
    grammar = grammar_of(SCHEMAS[kind][1]) if kind is not None else None
    return Turn(
        id=f"g.{number}/1/0", rollout=f"g.{number}", attempt=1, prompt_ids=PROMPT, response_ids=ids,
        logprobs=[-1.0] * len(ids), versions=[(0, "1.0")], finish="stop", started=0.0, ended=1.0,
        sampling=Sampling(temperature=temperature, grammar=grammar),
    )  # fmt: skip


def make_turns() -> tuple[list[Turn], list[str | None]]:
    """Answers to one prompt, so that those of different schemas share places in the tree."""
    draw, kinds = random.Random(3), [*SCHEMAS, None, *SCHEMAS, "words"]
    answers = [draw_answer(SCHEMAS[kind or "words"][0], draw) for kind in kinds]
    return [
        make_turn(n, ids, kind, 0.7 + n % 2) for n, (ids, kind) in enumerate(zip(answers, kinds, strict=True))
    ], kinds


@pytest.mark.parametrize("chunk", [None, 2000])
def test_logprobs_entropies_and_gradients_are_those_of_plain_rows(chunk: int | None) -> None:
    with unrounded():
        compare_with_plain_rows(chunk)


def compare_with_plain_rows(chunk: int | None) -> None:
    turns, kinds = make_turns()
    samples = [
        Sample(
            Rollout(id=turn.rollout, group="g", member=n, task=Task(id="t"), status="succeeded", created=0.0), [turn]
        )
        for n, turn in enumerate(turns)
    ]
    batch = assemble(samples, agents=["main"], budget=500)
    model = load(NANO, torch.float64).requires_grad_(True)
    masks = EntryMasks.of(batch.bare(), NANO, VOCABULARY)
    (piece,) = pack(batch, 500)
    logp, entropy = compute_logprobs(model, piece, batch.entries, masks=masks, chunk=chunk)
    torch.manual_seed(0)
    weights = torch.randn(2, len(batch.entries), dtype=torch.float64)
    found = {name: torch.empty(len(batch.entries), dtype=torch.float64) for name in ("logp", "entropy")}
    ours = (weights[0][piece.entry] * logp + weights[1][piece.entry] * entropy).sum()
    ours.backward()
    plain = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for t, (turn, kind) in enumerate(zip(turns, kinds, strict=True)):
        logits = plain(torch.tensor([turn.ids])).logits[0, len(PROMPT) - 1 : -1] / turn.sampling.temperature
        said = ""
        for row, (entry, token) in enumerate(zip(batch.rows(t), turn.response_ids, strict=True)):
            allowed = sorted(find_next(SCHEMAS[kind][0], said)) if kind is not None else list(range(VOCABULARY))
            logps = logits[row, allowed].log_softmax(-1)
            found["logp"][entry] = logps[allowed.index(token)].detach()
            found["entropy"][entry] = -(logps.exp() * logps).sum().detach()
            total = total + weights[0, entry] * logps[allowed.index(token)]
            total = total - weights[1, entry] * (logps.exp() * logps).sum()
            said += TEXTS[token]
    total.backward()
    assert (logp - found["logp"][piece.entry]).abs().max() < 1e-9
    assert (entropy - found["entropy"][piece.entry]).abs().max() < 1e-9
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - theirs[name].grad).abs().max() < 1e-9, name  # pyright: ignore
    forced = [batch.rows(t) for t, kind in enumerate(kinds) if kind == "one"]
    assert found["logp"][np.concatenate(forced)].max() == 0, "some are forced"


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_engine_draws_what_is_allowed_and_tells_its_logprob(deterministic: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    core = Core(load(NANO, torch.float32), EngineConfig(max_sequences=8, deterministic=deterministic), 128, folder=NANO)
    kinds = [*SCHEMAS, None] * 4
    for id, kind in enumerate(kinds):
        grammar = grammar_of(SCHEMAS[kind][1]) if kind is not None else None
        core.add(id, PROMPT, Sampling(temperature=1.5, seed=id, max_tokens=40, grammar=grammar), ENDS)
    answers = {id: ([], []) for id in range(len(kinds))}
    while core.busy:
        for id, chunk in core.step():
            assert not isinstance(chunk, Exception), chunk
            answers[id][0].extend(chunk.ids)
            answers[id][1].extend(chunk.logprobs)
    for id, kind in enumerate(kinds):
        ids, logprobs = answers[id]
        if kind is None:
            continue
        texts, said = SCHEMAS[kind][0], ""
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1] / 1.5
        for row, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            allowed = sorted(find_next(texts, said))
            expected = logits[row, allowed].double().log_softmax(-1)[allowed.index(token)]
            assert abs(logprob - expected) < 1e-4
            said += TEXTS[token]
        assert ids[-1] in ENDS
        assert "".join(TEXTS[token] for token in ids[:-1]) in texts
