"""Grammars in the embedded engine: who waits for them, who does not, and what becomes of those that cannot be."""

import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.embedded.matchers import KEPT, Matchers, take
from strop.errors import EngineError
from strop.learner.model import load
from strop.models.grammar import UNFORCED
from strop.types import AnswerGrammar, Sampling
from tests.unit.models.test_grammar import ENDS, NANO, TEXTS, TOKENIZER, VOCABULARY, grammar_of, read

PROMPT = TOKENIZER.encode("What is 12 + 5?").ids
HELD = Sampling(grammar=grammar_of({"enum": ["ab", "abc"]}), max_tokens=20, seed=1)


@pytest.fixture
def core() -> Core:
    return Core(load(NANO, torch.float32), EngineConfig(max_sequences=4), 128, folder=NANO)


def step(core: Core, answers: dict[int, list[int]]) -> dict[int, EngineError]:
    """Put what was drawn to the answers; returns the errors."""
    failed: dict[int, EngineError] = {}
    for id, chunk in core.step():
        if isinstance(chunk, Chunk):
            answers[id] += chunk.ids
        else:
            failed[id] = chunk
    return failed


def test_others_go_on_while_a_grammar_is_compiled(core: Core) -> None:
    compiles, answers = threading.Event(), defaultdict[int, list[int]](list)
    core.matchers = Matchers(NANO, VOCABULARY)
    core.matchers._aside.submit(compiles.wait)
    core.add(0, PROMPT, HELD, ENDS)
    core.add(1, PROMPT, Sampling(max_tokens=3, seed=2), ())
    for _ in range(4):
        assert not step(core, answers)
    assert (len(answers[1]), answers[0], core.busy) == (3, [], True)
    assert not step(core, answers), "with nobody else at work it looks again and again"
    compiles.set()
    while core.busy:
        assert not step(core, answers)
    assert "".join(TEXTS[id] for id in answers[0][:-1]) in ('"ab"', '"abc"')


def test_one_that_is_given_up_while_its_grammar_is_compiled_is_gone(core: Core) -> None:
    compiles = threading.Event()
    core.matchers = Matchers(NANO, VOCABULARY)
    core.matchers._aside.submit(compiles.wait)
    core.add(0, PROMPT, HELD, ENDS)
    core.cancel(0)
    compiles.set()
    assert not core.busy
    assert core.step() == []


def test_a_grammar_that_cannot_be_ends_its_own_request_alone(core: Core) -> None:
    wrong = Sampling(grammar=AnswerGrammar(text="start: nothing_like_it", ends=ENDS, version=""))
    answers, failed = defaultdict[int, list[int]](list), dict[int, EngineError]()
    core.add(0, PROMPT, wrong, ENDS)
    core.add(1, PROMPT, HELD, ENDS)
    while core.busy:
        failed |= step(core, answers)
    assert [*failed] == [0]
    assert "cannot be held to a schema: " in str(failed[0])
    assert "Fix: ask without one" in str(failed[0])
    assert answers[1][-1] in ENDS


def test_a_grammar_that_grows_too_large_ends_its_own_answer_alone(core: Core) -> None:
    """More ways to go on after a letter than the library follows."""
    ways = range(2100)
    text = f"start: {' | '.join(f'wide y{n}' for n in ways)}\nwide: /[a-z]/\n"
    text += "\n".join(f'y{n}: "b{n}"' for n in ways)
    wide = Sampling(grammar=AnswerGrammar(text=f"{UNFORCED}\n{text}", ends=ENDS, version=""), max_tokens=20, seed=3)
    answers, failed = defaultdict[int, list[int]](list), dict[int, EngineError]()
    core.add(0, PROMPT, wide, ENDS)
    core.add(1, PROMPT, HELD, ENDS)
    while core.busy:
        failed |= step(core, answers)
    assert [*failed] == [0]
    assert "cannot be held to its schema any longer: " in str(failed[0])
    assert "max is 2000" in str(failed[0])
    assert "".join(TEXTS[id] for id in answers[1][:-1]) in ('"ab"', '"abc"')


def test_a_grammar_is_compiled_once_and_its_answers_know_nothing_of_each_other() -> None:
    matchers, grammar = Matchers(NANO, VOCABULARY), grammar_of({"enum": ["ab", "ba"]})
    compiled = matchers.begin(grammar)
    assert matchers.begin(grammar_of({"enum": ["ab", "ba"]})) is compiled
    first, second = take(compiled), take(compiled)
    before = read(second)
    first.take(min(read(first)))
    assert read(second) == before == read(take(matchers.begin(grammar)))
    assert read(first) != before
    for n in range(KEPT):
        matchers.begin(grammar_of({"const": n}))
    assert matchers.begin(grammar) is not compiled


def test_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not one that grammars can be made over"):
        take(Matchers(tmp_path, VOCABULARY).begin(grammar_of({})))
