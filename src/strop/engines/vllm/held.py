"""Answers of vLLM that are held to a grammar.

    AnswerGrammar ──close_grammar──▶ "structured_outputs": {"grammar": ...} ──▶ llguidance in vLLM ──▶ masked logits
                  └──TokenMatcher──▶ every token that comes back is one that it allows, or the answer fails

vLLM puts the mask on the logits before all that `Sampling` does to them, so that a processed logprob is that of the
allowed tokens. Its `guidance` backend is the library that makes the learner's masks, which reads the same text: what
ends an answer is in it, and vLLM's own end of a text plays no part.

A server may do something else without a word: begin after thoughts, or go on without a mask when a grammar has grown
past the library's limits, where a token may be allowed though its mask cannot be found. The learner could not read
such an answer: it fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from strop.engines.matchers import find_matchers, take
from strop.engines.vllm.launch import OPEN, SCHEMAS
from strop.errors import EngineError
from strop.models.grammar import OutOfGrammar, TokenMatcher
from strop.types import AnswerGrammar

FIX = (
    f"Fix: install llguidance 1.7 and xgrammar beside vLLM and, if you start it yourself, do so with {OPEN} "
    f"--structured-outputs-config '{SCHEMAS}', and without --tokens-only"
)


class HeldAnswer:
    """One answer as it comes."""

    def __init__(self, matcher: TokenMatcher, url: str) -> None:
        self._matcher, self._url = matcher, url

    @staticmethod
    async def begin(folder: Path, vocabulary: int, grammar: AnswerGrammar, url: str) -> HeldAnswer:
        """Raises `EngineError` for a grammar that cannot be made over the model's tokenizer."""
        compiled = find_matchers(folder, vocabulary).begin(grammar)
        await asyncio.gather(asyncio.shield(asyncio.wrap_future(compiled)), return_exceptions=True)
        return HeldAnswer(take(compiled), url)

    async def check(self, ids: Sequence[int]) -> None:
        """Raises `EngineError` for tokens that the server should not have drawn, or drew without a mask."""
        try:
            await asyncio.to_thread(self._follow, ids)  # a mask takes milliseconds where the grammar is large
        except OutOfGrammar as error:
            raise EngineError(f"vLLM at {self._url} did not hold an answer to its schema: {error}. {FIX}") from None

    def _follow(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._matcher.find_allowed()
            self._matcher.take(id)

    def explain(self, error: EngineError) -> EngineError:
        """What a server says that refuses such an answer, and what to do."""
        return EngineError(f"vLLM at {self._url} cannot hold an answer to a schema: {error}. {FIX}")
