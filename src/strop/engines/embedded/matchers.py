"""Grammars of requests, made ready aside: other requests go on meanwhile.

    begin(grammar) ──▶ compiled once, in a thread ──▶ every request with that grammar gets a matcher of its own

Compiling takes milliseconds, or a second where a schema is large; reading the tokenizer, for the first of all, takes
longer than that.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from strop.errors import EngineError
from strop.models.grammar import BadSchema, TokenMatcher
from strop.types import AnswerGrammar

KEPT = 256
"""Grammars that are not compiled again."""


class Matchers:
    def __init__(self, model: Path, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._compiled: OrderedDict[AnswerGrammar, Future[TokenMatcher]] = OrderedDict()
        self._aside = ThreadPoolExecutor(1, "grammars")

    def begin(self, grammar: AnswerGrammar) -> Future[TokenMatcher]:
        """The matcher that those of this grammar's answers are copies of; `take` makes one."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._aside.submit(TokenMatcher, self._model, self._vocabulary, grammar)
            self._compiled[grammar] = found
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found


def take(compiled: Future[TokenMatcher]) -> TokenMatcher:
    """A matcher for one answer. Raises `EngineError` where there can be none."""
    try:
        return compiled.result().copy()
    except BadSchema as error:
        raise EngineError(f"the answer cannot be held to a schema: {error}. Fix: ask without one") from None
