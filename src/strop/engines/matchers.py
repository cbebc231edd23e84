"""Grammars of requests, made ready aside: other requests go on meanwhile.

    begin(grammar) ──▶ compiled once, in a thread ──▶ every request with that grammar gets a matcher of its own

Compiling takes milliseconds, or a second where a schema is large; reading the tokenizer, for the first of all, takes
longer than that. Each has a thread of its own, that one may take long and hold up no other, and that nobody who ends
waits for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path

from strop.errors import EngineError
from strop.imports import one_line
from strop.models.grammar import BadSchema, TokenMatcher
from strop.types import AnswerGrammar

KEPT = 256
"""Grammars that are not compiled again."""


class Matchers:
    """Of one model. Not thread-safe: one thread calls it."""

    def __init__(self, model: Path, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._compiled: OrderedDict[AnswerGrammar, Future[TokenMatcher]] = OrderedDict()

    def begin(self, grammar: AnswerGrammar) -> Future[TokenMatcher]:
        """The matcher that those of this grammar's answers are copies of; `take` makes one. Nobody cancels it."""
        found = self._compiled.get(grammar)
        if found is None or _is_spent(found):
            self._compiled[grammar] = found = Future[TokenMatcher]()
            found.set_running_or_notify_cancel()
            threading.Thread(target=self._compile, args=(grammar, found), name="grammar", daemon=True).start()
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def _compile(self, grammar: AnswerGrammar, to: Future[TokenMatcher]) -> None:
        try:
            to.set_result(TokenMatcher(self._model, self._vocabulary, grammar))
        except BaseException as error:  # also what the library is ended by
            to.set_exception(error)


@lru_cache(16)
def find_matchers(model: Path, vocabulary: int) -> Matchers:
    """Those of a model for all answers of this process that come from elsewhere."""
    return Matchers(model, vocabulary)


def take(compiled: Future[TokenMatcher]) -> TokenMatcher:
    """A matcher for one answer. Raises `EngineError` where there can be none."""
    if (error := compiled.exception()) is not None:
        why = error if isinstance(error, BadSchema) else one_line(error)
        raise EngineError(f"the answer cannot be held to a schema: {why}. Fix: ask without one") from None
    return compiled.result().copy()


def _is_spent(compiled: Future[TokenMatcher]) -> bool:
    return compiled.done() and compiled.exception() is None and compiled.result().spent
