"""One request at work: its choices draw tokens from the engine and turn them into deltas.

call = ModelCall(...)         ids, seeds and the prompt are fixed here, before anything is awaited
await call.run(emit)          samples all choices at once; `emit(delta)` as tokens arrive, unless it is None
call.choices[0].ids           what was sampled so far, whatever became of the run
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

import msgspec
from msgspec.structs import replace

from strop.engines.base import Chunk
from strop.errors import ContextOverflow, EngineError
from strop.gateway.contexts import Contexts, Prompt
from strop.gateway.conversation import Conversation, join_text
from strop.gateway.detokenize import Detokenizer, StopStrings
from strop.gateway.dialects.base import AnswerInfo, ApiError, ChoiceDone, Delta, ModelRequest, SampledToken, ToolCall
from strop.gateway.known_turns import call_id
from strop.gateway.prescribe import is_held, make_grammar, tell_unheld
from strop.gateway.route import PolicyRoute
from strop.gateway.session import Session
from strop.gateway.tool_calls import PLAIN
from strop.gateway.tool_calls.base import Piece, Thought
from strop.types import AnswerGrammar, Finish, Sampling

Emit = Callable[[Delta], Awaitable[None]]

SHORTEN = "Please reduce the length of the messages."


class ModelCall:
    """A request that has its prompts. Raises `BadTemplate` if the chat template refuses the messages and
    `ContextOverflow` if they leave no tokens for an answer."""

    def __init__(self, session: Session, agent: str, route: PolicyRoute, request: ModelRequest) -> None:
        route = route.asked_by(request)
        request = tell_unheld(request, route)
        self.session, self.agent, self.route, self.request = session, agent, route, request
        self.started = time.time()
        is_held(request, route)  # or else it is refused, before anything is rendered
        prompts: list[tuple[Conversation, Prompt, str, Sampling]] = []
        contexts = session.contexts(agent, route.policy)
        for conversation in read_conversations(request, route, contexts):
            check_length(conversation, route)
            prompt = contexts.prompt(route.renderer, conversation, route.history)
            num_left = route.context - len(prompt.ids)
            if num_left < 1:
                raise ContextOverflow(
                    f"This model's maximum context length is {route.context} tokens. However, your messages "
                    f"resulted in {len(prompt.ids)} tokens. {SHORTEN}"
                )
            lead = find_lead(conversation, prompt, route)
            grammar = make_grammar(request, route, lead)
            prompts.append((conversation, prompt, lead, self._sampling(num_left, grammar)))
        self.choices: list[Choice] = []  # numbers and seeds are given out once nothing can be refused any more
        for conversation, prompt, lead, sampling in prompts:
            for _ in range(request.n):
                seed = session.next_seed(agent, prompt)
                given = replace(sampling, seed=seed)
                self.choices.append(Choice(len(self.choices), self, conversation, prompt, lead, given))

    def _sampling(self, num_left: int, grammar: AnswerGrammar | None) -> Sampling:
        given, request = self.route.sampling_for(self.session.rollout), self.request
        if self.session.is_call:
            given = replace(given, **read_sampling(request))
        return replace(
            given,
            max_tokens=min(given.max_tokens, request.max_tokens or given.max_tokens, num_left),
            stop=(*given.stop, *self.route.renderer.stop_texts, *request.stop),
            grammar=grammar,
        )

    async def run(self, emit: Emit | None) -> None:
        """Sample every choice to its end. The first `EngineError` ends them all."""
        if len(self.choices) == 1:
            return await self.choices[0].run(emit)
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(choice.run(emit))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    @property
    def answer(self) -> AnswerInfo:
        prompts = [choice.prompt for choice in self.choices[:: self.request.n]]
        return AnswerInfo(
            id=self.choices[0].turn,
            model=self.route.model,
            created=int(self.started),
            prompt_tokens=sum([len(prompt.ids) for prompt in prompts]),
            cached_tokens=sum([prompt.shared for prompt in prompts]),
            response_tokens=sum([len(choice.ids) for choice in self.choices]),
            reasoning_tokens=sum([choice.reasoning_tokens for choice in self.choices]),
            prompt_ids=[prompt.ids for prompt in prompts],
        )


def read_sampling(request: ModelRequest) -> dict[str, float]:
    """How a request wants its tokens drawn.

    >>> read_sampling(ModelRequest(requested={"temperature": 0, "top_k": -1, "n": 2}))
    {'temperature': 0.0, 'top_k': 0}
    """
    asked = {name: float(request.requested[name]) for name in _DRAWN if name in request.requested}
    return asked | ({"top_k": max(request.requested["top_k"], 0)} if "top_k" in request.requested else {})


_DRAWN = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def read_conversations(request: ModelRequest, route: PolicyRoute, contexts: Contexts) -> list[Conversation]:
    """What is asked: one conversation, or raw prompts. A call that must be made is begun for a model that no grammar
    can hold to it."""
    if request.prompts:
        return [_raw(prompt, route.renderer.num_ids) for prompt in request.prompts]
    messages, tools, renderer, begun = request.messages, request.tools, route.renderer, request.prefill
    if request.tool_choice == "required" and not is_held(request, route):
        only = request.tools[0]["function"]["name"] if len(request.tools or ()) == 1 else None
        forced = renderer.format.begin_call(request.tool or only)
        if forced is None or begun:
            raise ApiError(
                "a tool call cannot be demanded of this model. Fix: use tool_choice 'auto'",
                param="tool_choice",
                code="unsupported_value",
            )
        begun = forced
    if not begun:
        return [contexts.read(messages, tools, variables=renderer.variables)]
    # Where the prompt makes the model think first, it has done so; unless the agent says itself what was thought.
    thought = renderer.format.find_open_thought(renderer.opening(messages, tools))
    lead = f"{thought}\n\n{begun}" if thought and thought not in begun else begun
    return [contexts.read(messages, tools, variables=renderer.variables, lead=lead, prefill=request.prefill)]


def find_lead(conversation: Conversation, prompt: Prompt, route: PolicyRoute) -> str:
    """What stands before an answer in its own turn: what the template writes there, and what is given of the answer."""
    if conversation.messages[0]["role"] == "prompt":
        return ""
    lead = conversation.lead
    return route.renderer.opening(conversation.messages, conversation.tools, prompt.ids, lead) + lead


def _raw(prompt: str | list[int], num_ids: int) -> Conversation:
    if not isinstance(prompt, str) and (unknown := [id for id in prompt if not 0 <= id < num_ids]):
        raise ApiError(
            f"{unknown[0]} is not a token of this model. Fix: use ids from 0 to {num_ids - 1}",
            param="prompt",
            code="invalid_value",
        )
    return Conversation.raw(prompt)


def check_length(conversation: Conversation, route: PolicyRoute) -> None:
    """Refuse what is far too long for the model by its beginning: nobody else is answered while text is tokenised, and
    an agent may send megabytes of it, in messages, in calls or in tools."""
    context = route.context
    if conversation.num_chars <= 8 * context and conversation.longest_thought <= 8 * context:
        return
    messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
    texts = [join_text(message) for message in messages]
    if tools or variables:
        texts.append(msgspec.json.encode([tools, variables]).decode())
    thoughts = [message.get("reasoning_content") or "" for message in messages]  # templates may leave them out
    for text in ("".join(texts), *thoughts):
        size = 8 * context  # characters; more than most text of so many tokens has
        while size < len(text):
            if len(route.renderer.encode(text[:size])) > context + 64:  # where it is cut, or joined, it may be more
                raise ContextOverflow(f"This model's maximum context length is {context} tokens. {SHORTEN}")
            size *= 4


class Choice:
    """One answer in the making: what was sampled, and what of it the agent sees."""

    def __init__(
        self, index: int, call: ModelCall, conversation: Conversation, prompt: Prompt, lead: str, sampling: Sampling
    ) -> None:
        self.index, self.conversation, self.prompt, self.sampling = index, conversation, prompt, sampling
        self.turn = call.session.next_turn()
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, str]] = []
        self.finish: Finish | None = None
        self.text = self.reasoning = ""
        self.reasoning_tokens = 0
        self.calls: list[ToolCall] = []
        self.tokens: list[SampledToken] = []
        self._route, self._request = call.route, call.request
        renderer = call.route.renderer
        self._detokenizer = Detokenizer(renderer.decode_said)
        self._stops = StopStrings(sampling.stop)
        raw = bool(call.request.prompts)  # then its answer is raw too
        format = PLAIN if raw else renderer.format
        whole = call.request.schema is not None
        self._parser = format.parser(call.request.tools, calls=call.request.parse_tools, lead=lead, whole=whole)
        self._one_by_one = bool(sampling.stop) or call.request.one_call  # an answer may end at any token

    @property
    def malformed(self) -> int:
        return self._parser.malformed

    @property
    def done(self) -> ChoiceDone:
        return ChoiceDone(
            choice=self.index,
            text=self.text,
            reasoning=self.reasoning,
            calls=tuple(self.calls),
            tokens=tuple(self.tokens),
            ids=tuple(self.ids) if self._request.token_ids else (),
            finish=self.finish or "abandoned",
            stopped_by=self._stops.hit if self._stops.hit in self._request.stop else None,
        )

    async def run(self, emit: Emit | None) -> None:
        engine, stop_ids = self._route.engine, self._route.renderer.stop_ids
        stream = engine.generate(self.prompt.ids, self.sampling, stop_ids=stop_ids)
        chunks = cast(AsyncGenerator[Chunk, None], stream)
        try:
            async for chunk in chunks:
                first = len(self.ids)
                said = self._say(self._take(chunk), first)
                if emit is not None and said is not None:
                    await emit(said)
                if self.finish is not None:
                    return
        finally:
            await chunks.aclose()
        raise EngineError("the engine's answer ended without a reason")

    def _take(self, chunk: Chunk) -> list[Piece]:
        assert len(chunk.ids) == len(chunk.logprobs), "an engine gives one logprob per token"
        if chunk.ids and (not self.versions or self.versions[-1][1] != chunk.version):
            self.versions.append((len(self.ids), chunk.version))
        pieces: list[Piece] = []
        width = 1 if self._one_by_one else max(1, len(chunk.ids))
        for start in range(0, len(chunk.ids), width):
            ids = chunk.ids[start : start + width]
            self.ids += ids
            self.logprobs += chunk.logprobs[start : start + width]
            pieces += self._parser.feed(self._stops.feed(self._detokenizer.feed(ids)))
            if self._stops.hit or (self._request.one_call and self._parser.calls):
                return pieces + self._end("stop")
        if chunk.finish is not None:
            pieces += self._end(chunk.finish)
        return pieces

    def _end(self, finish: Finish) -> list[Piece]:
        pieces = self._parser.feed(self._stops.feed(self._detokenizer.close()) + self._stops.close())
        pieces += self._parser.close(cut=finish == "length")
        if finish == "stop" and self._parser.calls:
            finish = "tool_calls"
        self.finish = finish
        return pieces

    def _say(self, pieces: list[Piece], first: int) -> Delta | None:
        """Add what the tokens from `first` on have said."""
        text = reasoning = ""
        calls: list[ToolCall] = []
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            elif isinstance(piece, Thought):
                reasoning += piece.text
            else:
                position = len(self.calls) + len(calls)
                own = piece.id if piece.id and piece.id not in {call.id for call in (*self.calls, *calls)} else None
                id = own or call_id(self.sampling.seed, position)
                calls.append(ToolCall(position, id, piece.name, piece.arguments))
        tokens = self._describe_tokens(first) if self._request.logprobs else []
        if reasoning and not text:
            self.reasoning_tokens = len(self.ids)
        self.text += text
        self.reasoning += reasoning
        self.calls += calls
        self.tokens += tokens
        ids = tuple(self.ids[first:]) if self._request.token_ids else ()
        if not (text or reasoning or calls or tokens or ids) or not self._request.stream:
            return None
        return Delta(
            choice=self.index, reasoning=reasoning, text=text, calls=tuple(calls), tokens=tuple(tokens), ids=ids
        )

    def _describe_tokens(self, first: int) -> list[SampledToken]:
        known, sampled = self._route.renderer.tokens, zip(self.ids[first:], self.logprobs[first:], strict=True)
        return [SampledToken((token := known[id])[0], logprob, token[1]) for id, logprob in sampled]
