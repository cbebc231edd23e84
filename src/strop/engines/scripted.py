"""An engine that plays fixed answers: for testing agents, recipes and everything around them without a model.

    engine = Scripted(["<tool_call>...</tool_call>", "It is 12."], renderer)              one answer after the other
    engine = Scripted({"3 * 4": "<tool_call>...</tool_call>", "12": "It is 12."}, renderer)   by what the prompt says
    engine = Scripted(lambda asked: "yes" if "?" in asked.prompt else [7, 8], renderer)   or by any rule

Text is encoded and ended with the end-of-turn token; ids are played as they are. An exception in place of an answer is
raised; `Breaks(answer, error)` plays some tokens first, and `Hangs(answer)` then gives no sign of life. `Failures` has
some requests fail whatever their answer is. `engine.calls` has what was asked and what was played.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from strop.engines.base import Chunk, Engine, GivenAnswer
from strop.engines.receiver import WeightSource
from strop.errors import ConfigError, ContextOverflow, EngineError
from strop.types import Sampling, stable_hash


class Tokens(Protocol):
    """What turns text into ids and back; `strop.gateway.template.Renderer` does."""

    end_of_turn: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Breaks(Struct, frozen=True):
    """An answer that is cut off by an error once its tokens were played."""

    answer: str | Sequence[int]
    error: Exception = EngineError("the script broke off here")


class Hangs(Struct, frozen=True):
    """An answer that never ends: its tokens are played, and then nothing comes until somebody gives up."""

    answer: str | Sequence[int] = ()


Answer = str | Sequence[int] | Exception | Breaks | Hangs


class ScriptedRequest(Struct, frozen=True, kw_only=True):
    """A request, as a script's function sees it. `prompt` is the prompt as text, special tokens included."""

    prompt_ids: list[int]
    prompt: str
    sampling: Sampling


class Played(Struct, kw_only=True):
    """A request and what became of it: the ids given out so far, and whether the answer was played to its end."""

    asked: ScriptedRequest
    ids: list[int] = msgspec.field(default_factory=list[int])
    finished: bool = False


class Failures(Struct, frozen=True, kw_only=True):
    """Which requests fail: those numbered `requests` (from 1, in the order they begin), and a share `rate` of all,
    drawn from `seed`. `after` tokens of the answer they raise `error`, or hang if that is None.

    >>> [n for n in range(1, 21) if Failures(requests=(2,), rate=0.1, seed=1).hits(n)]
    [2, 4, 12, 15, 19]
    """

    requests: tuple[int, ...] = ()
    rate: float = 0.0
    seed: int = 0
    after: int = 0
    error: Exception | None = EngineError("the script has this request fail")

    def hits(self, number: int) -> bool:
        return number in self.requests or stable_hash(self.seed, number) < self.rate * 2.0**63


class Scripted(Engine):
    """Plays `script`: a list of answers, taken in the order requests begin; a table of answers by a text in the prompt;
    or a function from `ScriptedRequest` to an answer. Of a table's texts the one that the prompt says last counts, so
    that in a conversation each turn has its own answer; "" is for all other prompts.

    `chunk` tokens are given out at a time, `latency` seconds before each: a number, or a function of how many tokens
    were given out before, such as `lambda given: 0.01 if given else 2.0` for a slow start. Every token has the logprob
    `logprob`.
    """

    def __init__(
        self,
        script: Sequence[Answer] | Mapping[str, Answer] | Callable[[ScriptedRequest], Answer],
        tokens: Tokens,
        *,
        context: int = 4096,
        chunk: int = 4,
        latency: float | Callable[[int], float] = 0.0,
        failures: Failures | None = None,
        logprob: float = -0.5,
        version: str = "1.0",
    ) -> None:
        if isinstance(script, (str, bytes)):  # a text is a sequence too: its letters would be the answers
            raise ConfigError(f"the answers are one text, {script!r}. Fix: give a list of answers, [{script!r}]")
        self._context = context
        self.version = version
        self.calls: list[Played] = []
        self._script = script
        self._tokens = tokens
        self._chunk = chunk
        self._latency = latency
        self._failures = failures or Failures()
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
        played = Played(asked=ScriptedRequest(prompt_ids=prompt, prompt=self._tokens.decode(prompt), sampling=sampling))
        answer = self._next(played)
        fails = self._failures.hits(len(self.calls))
        await self._open.wait()
        self._in_flight += 1
        self._idle.clear()
        try:
            whole = isinstance(answer, str | Sequence) and not fails
            ids = self._ids(answer.answer if isinstance(answer, Breaks | Hangs) else answer)
            ids, finish = _cut(ids, stop_ids, min(sampling.max_tokens, self._context - len(prompt)))
            ids = ids[: self._failures.after] if fails else ids
            for start in range(0, max(int(whole), len(ids)), self._chunk):
                await self._wait(start)
                part = ids[start : start + self._chunk]
                last = start + self._chunk >= len(ids) and whole
                played.ids += part
                played.finished = last
                yield Chunk(
                    ids=part,
                    logprobs=[self._logprob] * len(part),
                    version=self.version,
                    finish=finish if last else None,
                )
            if whole:
                return
            error = self._failures.error if fails else answer.error if isinstance(answer, Breaks) else None
            if error is not None:
                raise error.with_traceback(None)  # it may be raised many times
            await asyncio.Event().wait()  # until the caller gives up
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _wait(self, given: int) -> None:
        seconds = self._latency(given) if callable(self._latency) else self._latency
        if seconds:
            await asyncio.sleep(seconds)

    def _next(self, played: Played) -> str | Sequence[int] | Breaks | Hangs:
        number = len(self.calls)
        self.calls.append(played)
        if callable(self._script):
            answer = self._script(played.asked)
        elif isinstance(self._script, Mapping):
            answer = _latest(self._script, played.asked.prompt)
        elif number < len(self._script):
            answer = self._script[number]
        else:
            raise EngineError(f"the script has {len(self._script)} answers and was asked for one more. Fix: add it")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ids(self, answer: str | Sequence[int]) -> list[int]:
        if isinstance(answer, str):
            return [*self._tokens.encode(answer), self._tokens.end_of_turn]
        return list(answer)

    @classmethod
    def refuse_scoring(cls, temperature: float) -> None:
        """Given tokens have the logprob that played ones have, at any."""

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        return [[self._logprob] * len(answer.response_ids) for answer in answers]

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        self.version = version

    async def close(self) -> None: ...


def _latest(table: Mapping[str, Answer], prompt: str) -> Answer:
    """The answer for the text that the prompt says last; of two that end at the same place the longer one.

    >>> _latest({"weather": "call", "rain": "umbrella", "": "?"}, "the weather? ... rain")
    'umbrella'
    """
    found = [(prompt.rfind(text) + len(text), len(text), text) for text in table if text and text in prompt]
    if not found and "" not in table:
        raise EngineError(
            "no text of the script is in the prompt. Fix: add one, or '' for all others; it ends with "
            f"{prompt[-200:]!r}"
        )
    return table[max(found)[2] if found else ""]


def _cut(ids: list[int], stop_ids: Sequence[int], most: int) -> tuple[list[int], Literal["stop", "length"]]:
    """As an engine would end it: at the first stop token, or where the context is full."""
    for i, token in enumerate(ids[:most]):
        if token in stop_ids:
            return ids[: i + 1], "stop"
    return ids[:most], "length" if len(ids) >= most else "stop"
