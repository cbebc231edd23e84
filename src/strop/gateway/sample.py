"""One request at work: its choices draw tokens from the engine and turn them into deltas.

call = Call(...)              ids, seeds and the prompt are fixed here, before anything is awaited
await call.run(emit)          samples all choices at once; `emit(delta)` as tokens arrive
call.choices[0].ids           what was sampled so far, whatever became of the run
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from strop.engines.base import Chunk, Engine
from strop.errors import ContextOverflow, EngineError
from strop.gateway.dialects.base import Answer, ChoiceDone, Delta, Request, SampledToken, ToolCall
from strop.gateway.parse import Detokenizer, Piece, StopStrings, ToolCalls
from strop.gateway.render import Renderer
from strop.gateway.session import Place, Prompt, Session
from strop.types import Finish, Rollout, Sampling, stable_hash

Emit = Callable[[Delta], Awaitable[None]]


class PolicyRoute(Struct, frozen=True, kw_only=True):
    """Who answers for an agent: a policy, the engine that serves it, its renderer, and how a rollout samples.

    `sampling_for` decides by rollout (training, evaluation, greedy evaluation); its settings win over the request's.
    """

    policy: str
    model: str
    engine: Engine
    renderer: Renderer
    sampling_for: Callable[[Rollout], Sampling]


SHORTEN = "Please reduce the length of the messages."


class Call:
    """A request that has its prompt. Raises `BadTemplate` if the chat template refuses the messages and
    `ContextOverflow` if they leave no room for an answer."""

    def __init__(self, session: Session, agent: str, route: PolicyRoute, request: Request) -> None:
        self.session, self.agent, self.route, self.request = session, agent, route, request
        self.started = time.time()
        # No token is longer than the longest one: text beyond that is refused before it is worth tokenising.
        if sum(len(message["content"]) for message in request.messages) > route.engine.context * route.renderer.longest:
            raise ContextOverflow(f"This model's maximum context length is {route.engine.context} tokens. {SHORTEN}")
        self.place = Place.of(request.messages, request.tools)
        contexts = session.contexts(agent)
        self.prompt: Prompt = contexts.prompt(route.renderer, request.messages, request.tools, self.place)
        room = route.engine.context - len(self.prompt.ids)
        if room < 1:
            raise ContextOverflow(
                f"This model's maximum context length is {route.engine.context} tokens. However, your messages "
                f"resulted in {len(self.prompt.ids)} tokens. {SHORTEN}"
            )
        sampling = route.sampling_for(session.rollout)
        sampling = replace(
            sampling,
            max_tokens=min(sampling.max_tokens, request.max_tokens or sampling.max_tokens, room),
            stop=(*sampling.stop, *request.stop),
        )
        self.choices = [self._choice(i, sampling) for i in range(request.n)]

    def _choice(self, index: int, sampling: Sampling) -> Choice:
        seed = self.session.next_seed(self.agent, self.prompt.ids)
        return Choice(
            index, self.session.next_turn(), replace(sampling, seed=seed), self.prompt, self.route, self.request
        )

    async def run(self, emit: Emit) -> None:
        """Sample every choice to its end. The first `EngineError` ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(choice.run(emit))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    @property
    def answer(self) -> Answer:
        return Answer(
            id=self.choices[0].turn,
            model=self.route.model,
            created=int(self.started),
            prompt_tokens=len(self.prompt.ids),
            response_tokens=sum(len(choice.ids) for choice in self.choices),
        )


class Choice:
    """One answer in the making: what was sampled, and what of it the agent sees."""

    def __init__(
        self, index: int, turn: str, sampling: Sampling, prompt: Prompt, route: PolicyRoute, request: Request
    ) -> None:
        self.index, self.turn, self.sampling = index, turn, sampling
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, str]] = []
        self.finish: Finish | None = None
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[SampledToken] = []
        self._prompt, self._route, self._request = prompt, route, request
        self._detokenizer = Detokenizer(route.renderer.spoken)
        self._stops = StopStrings(sampling.stop)
        self._parser = ToolCalls() if request.parse_tools else None
        self._one_by_one = bool(sampling.stop) or request.one_call  # an answer may end at any token

    @property
    def malformed(self) -> int:
        return self._parser.malformed if self._parser else 0

    @property
    def done(self) -> ChoiceDone:
        return ChoiceDone(
            choice=self.index,
            text=self.text,
            calls=tuple(self.calls),
            tokens=tuple(self.tokens),
            finish=self.finish or "abandoned",
        )

    async def run(self, emit: Emit) -> None:
        engine, stop_ids = self._route.engine, self._route.renderer.stop_ids
        stream = engine.generate(self._prompt.ids, self.sampling, stop_ids=stop_ids)
        async with aclosing(cast(AsyncGenerator[Chunk, None], stream)) as chunks:
            async for chunk in chunks:
                delta = self._take(chunk)
                if delta is not None:
                    await emit(delta)
                if self.finish is not None:
                    return
        raise EngineError("the engine's answer ended without a reason")

    def _take(self, chunk: Chunk) -> Delta | None:
        assert len(chunk.ids) == len(chunk.logprobs), "an engine gives one logprob per token"
        if chunk.ids and (not self.versions or self.versions[-1][1] != chunk.version):
            self.versions.append((len(self.ids), chunk.version))
        first = len(self.ids)
        pieces: list[Piece] = []
        width = 1 if self._one_by_one else max(1, len(chunk.ids))
        for start in range(0, len(chunk.ids), width):
            ids = chunk.ids[start : start + width]
            self.ids += ids
            self.logprobs += chunk.logprobs[start : start + width]
            pieces += self._read(ids)
            if self._stops.hit or (self._request.one_call and self._parser and self._parser.calls):
                return self._delta(first, pieces + self._end("stop"))
        if chunk.finish is not None:
            pieces += self._end(chunk.finish)
        return self._delta(first, pieces)

    def _read(self, ids: Sequence[int]) -> list[Piece]:
        stop_ids = self._route.renderer.stop_ids  # never part of the text, even where they are no special tokens
        return self._parsed(self._stops.feed(self._detokenizer.feed([i for i in ids if i not in stop_ids])))

    def _parsed(self, text: str) -> list[Piece]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [text] if text else []

    def _end(self, finish: Finish) -> list[Piece]:
        pieces = self._parsed(self._stops.feed(self._detokenizer.close()) + self._stops.close())
        if self._parser is not None:
            pieces += self._parser.close()
            if finish == "stop" and self._parser.calls:
                finish = "tool_calls"
        self.finish = finish
        return pieces

    def _delta(self, first: int, pieces: list[Piece]) -> Delta | None:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls: list[ToolCall] = []
        for piece in pieces:
            if not isinstance(piece, str):
                position = len(self.calls) + len(calls)
                name = f"call_{stable_hash(self.sampling.seed or 0, 'call', position):016x}"
                calls.append(ToolCall(position, name, piece.name, piece.arguments))
        tokens = self._sampled(first) if self._request.logprobs else []
        self.text += text
        self.calls += calls
        self.tokens += tokens
        if not (text or calls or tokens):
            return None
        return Delta(choice=self.index, text=text, calls=tuple(calls), tokens=tuple(tokens))

    def _sampled(self, first: int) -> list[SampledToken]:
        decode = self._route.renderer.decode
        tokens: list[SampledToken] = []
        for token, logprob in zip(self.ids[first:], self.logprobs[first:], strict=True):
            text = decode([token])
            tokens.append(SampledToken(text, logprob, None if "\ufffd" in text else list(text.encode())))
        return tokens
