"""An engine that plays fixed answers: for testing agents, recipes and everything around them without a model.

    engine = Scripted(["<tool_call>...</tool_call>", "It is 12."], renderer)              one answer after the other
    engine = Scripted(lambda asked: "yes" if "?" in asked.prompt else [7, 8], renderer)   or by what was asked

Text is encoded and ended with the end-of-turn token; ids are played as they are. An exception in place of an answer is
raised, and `Breaks(answer, error)` plays some tokens first. `engine.calls` has what was asked and what was played.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from strop.engines.base import Chunk, Engine
from strop.errors import ContextOverflow, EngineError
from strop.types import Sampling


class Tokens(Protocol):
    """What turns text into ids and back; `strop.gateway.render.Renderer` does."""

    end_of_turn: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Breaks(Struct, frozen=True):
    """An answer that is cut off by an error once its tokens were played."""

    answer: str | Sequence[int]
    error: Exception = EngineError("the script broke off here")


Answer = str | Sequence[int] | Exception | Breaks


class Asked(Struct, frozen=True, kw_only=True):
    """A request, as a script's function sees it. `prompt` is the prompt as text, special tokens included."""

    prompt_ids: list[int]
    prompt: str
    sampling: Sampling


class Played(Struct, kw_only=True):
    """A request and what became of it: the ids given out so far, and whether the answer was played to its end."""

    asked: Asked
    ids: list[int] = msgspec.field(default_factory=list[int])
    finished: bool = False


class Scripted(Engine):
    """Plays `script`: a list of answers, taken in the order requests begin, or a function from `Asked` to an answer.

    `chunk` tokens are given out at a time, `latency` seconds before each. Every token has the logprob `logprob`.
    """

    def __init__(
        self,
        script: Sequence[Answer] | Callable[[Asked], Answer],
        tokens: Tokens,
        *,
        context: int = 4096,
        chunk: int = 4,
        latency: float = 0.0,
        logprob: float = -0.5,
        version: str = "1.0",
    ) -> None:
        self._context = context
        self.version = version
        self.calls: list[Played] = []
        self._script = script
        self._tokens = tokens
        self._chunk = chunk
        self._latency = latency
        self._logprob = logprob
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def context(self) -> int:
        return self._context

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        if len(prompt_ids) >= self._context:
            raise ContextOverflow(f"the prompt has {len(prompt_ids)} tokens, the context {self._context}")
        prompt = list(prompt_ids)
        played = Played(asked=Asked(prompt_ids=prompt, prompt=self._tokens.decode(prompt), sampling=sampling))
        answer = self._next(played)
        await self._open.wait()
        self._in_flight += 1
        self._idle.clear()
        try:
            error = answer.error if isinstance(answer, Breaks) else None
            ids = self._ids(answer.answer if isinstance(answer, Breaks) else answer)
            ids, finish = _cut(ids, stop_ids, min(sampling.max_tokens, self._context - len(prompt)))
            for start in range(0, max(1, len(ids)), self._chunk):
                if self._latency:
                    await asyncio.sleep(self._latency)
                part = ids[start : start + self._chunk]
                last = start + self._chunk >= len(ids) and error is None
                played.ids += part
                played.finished = last
                yield Chunk(
                    ids=part,
                    logprobs=[self._logprob] * len(part),
                    version=self.version,
                    finish=finish if last else None,
                )
            if error is not None:
                raise error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _next(self, played: Played) -> str | Sequence[int] | Breaks:
        number = len(self.calls)
        self.calls.append(played)
        if callable(self._script):
            answer = self._script(played.asked)
        elif number < len(self._script):
            answer = self._script[number]
        else:
            raise EngineError(f"the script has {len(self._script)} answers and was asked for one more: add it")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ids(self, answer: str | Sequence[int]) -> list[int]:
        if isinstance(answer, str):
            return [*self._tokens.encode(answer), self._tokens.end_of_turn]
        return list(answer)

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def load(self, version: str) -> None:
        self.version = version

    async def close(self) -> None: ...


def _cut(ids: list[int], stop_ids: Sequence[int], most: int) -> tuple[list[int], Literal["stop", "length"]]:
    """As an engine would end it: at the first stop token, or where there is no room for more."""
    for i, token in enumerate(ids[:most]):
        if token in stop_ids:
            return ids[: i + 1], "stop"
    return ids[:most], "length" if len(ids) >= most else "stop"
