"""Grammars in the embedded engine: who waits for them, who does not, and what becomes of those that cannot be."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strop.config import EngineConfig
from strop.engines import matchers
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.matchers import KEPT, Matchers, take
from strop.errors import EngineError
from strop.learner.model import load
from strop.models.grammar import UNFORCED, GrammarLimit, TokenMatcher
from strop.types import AnswerGrammar, Sampling
from tests.unit.models.test_grammar import (
    ENDS,
    MANY,
    NANO,
    TEXTS,
    TOKENIZER,
    USUAL,
    VOCABULARY,
    WIDE,
    follow,
    grammar_of,
    read,
)

PROMPT = TOKENIZER.encode("What is 12 + 5?").ids
QUICK = grammar_of({"const": "quick"})
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


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until then no grammar is compiled but `QUICK`."""
    event = threading.Event()

    def wait(model: Path, vocabulary: int, grammar: AnswerGrammar) -> TokenMatcher:
        if grammar != QUICK:
            event.wait()
        return TokenMatcher(model, vocabulary, grammar)

    monkeypatch.setattr(matchers, "TokenMatcher", wait)
    yield event
    event.set()


def test_others_go_on_while_a_grammar_is_compiled(core: Core, compiles: threading.Event) -> None:
    answers = defaultdict[int, list[int]](list)
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


def test_one_that_takes_long_holds_up_no_other_and_not_the_end_of_the_process(compiles: threading.Event) -> None:
    several = Matchers(NANO, VOCABULARY)
    slow, quick = several.begin(grammar_of({"type": "null"})), several.begin(QUICK)
    assert read(quick.result(timeout=20))
    assert not slow.done()
    assert not slow.cancel(), "others wait for it too"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "grammar")
    compiles.set()
    assert slow.result(timeout=20)


def test_one_that_is_given_up_while_its_grammar_is_compiled_is_gone(core: Core, compiles: threading.Event) -> None:
    core.add(0, PROMPT, HELD, ENDS)
    core.cancel(0)
    compiles.set()
    assert not core.busy
    assert core.step() == []


@pytest.mark.parametrize("text", ["start: nothing_like_it", "start: T\nT: /(a\nstart: b)/"])
def test_a_grammar_that_cannot_be_ends_its_own_request_alone(core: Core, text: str) -> None:
    wrong = Sampling(grammar=AnswerGrammar(text=text, ends=ENDS, version=""))
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
    kept, grammar = Matchers(NANO, VOCABULARY), grammar_of({"enum": ["ab", "ba"]})
    compiled = kept.begin(grammar)
    assert kept.begin(grammar_of({"enum": ["ab", "ba"]})) is compiled
    first, second = take(compiled), take(compiled)
    before = read(second)
    first.take(min(read(first)))
    assert read(second) == before == read(take(kept.begin(grammar)))
    assert read(first) != before
    for n in range(KEPT):
        kept.begin(grammar_of({"const": n}))
    assert kept.begin(grammar) is not compiled


def test_whatever_goes_wrong_with_a_grammar_is_its_requests_error(monkeypatch: pytest.MonkeyPatch, core: Core) -> None:
    class Panic(BaseException):
        pass

    def fail(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(matchers, "TokenMatcher", fail)
    core.add(0, PROMPT, HELD, ENDS)
    failed: dict[int, EngineError] = {}
    while core.busy:
        failed |= step(core, defaultdict(list))
    assert "cannot be held to a schema: Panic: index out of bounds. Fix: " in str(failed[0])


def test_a_grammar_that_came_to_its_limit_is_compiled_anew_for_those_who_come_later() -> None:
    several = Matchers(NANO, VOCABULARY)
    spent = several.begin(WIDE)
    with pytest.raises(GrammarLimit):
        follow(take(spent), MANY)
    assert several.begin(WIDE) is not spent
    follow(take(several.begin(WIDE)), USUAL)
    assert not several.begin(WIDE).result().spent


def test_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not one that grammars can be made over"):
        take(Matchers(tmp_path, VOCABULARY).begin(grammar_of({})))
