"""One episode: ask the model, run the tools it calls, let the other side react, ask again.

    messages ──▶ model ──answer──▶ calls run at once ──Action──▶ react ──Transition──▶ messages ...
                                   what happened                 what it means

It ends when the reaction says so, when there is nothing to go on from, or at a limit; `Episode.ended` says which. A
turn's own reward is reported as soon as it is known, so that it is kept even if the rest fails.

Left out: streaming, n > 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct, field

from strop.agent.llm import LLM
from strop.agent.tool import Observation
from strop.agent.toolbox import Tools
from strop.errors import AgentError, ConfigError, TaskError
from strop.tasks.text import text_fields
from strop.types import Task

Ended = Literal["answered", "done", "turns", "tokens", "length", "context", "seconds"]
"""answered: the model called no tool; done: the environment said so; turns, tokens, seconds: a limit of the agent's;
length: the answer was cut off by the policy's own limit; context: the conversation does not fit the model any more."""
AT_ONCE = 32
"""Calls of one answer that run at the same time; more of them wait for their turn."""
Message = dict[str, Any]


class ExecutedCall(Struct, kw_only=True):
    """A tool call as the model wrote it, and what came of it. `turn` is the id of the answer that it stood in."""

    id: str
    name: str
    arguments: str
    turn: str
    result: Observation = Observation("error: it had not ended when the time was up", "timeout")
    seconds: float = 0.0

    @property
    def given(self) -> dict[str, Any]:
        """The arguments as the model meant them; empty if they cannot be read.

        >>> ExecutedCall(id="c", name="add", arguments='{"a": 1}', turn="t").given
        {'a': 1}
        """
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            return msgspec.json.decode(self.arguments, type=dict[str, Any])
        return {}


class Action(Struct, kw_only=True):
    """What the model did in one turn: what it said, and the calls it made, which have been run."""

    text: str
    calls: list[ExecutedCall] = []
    turn: str


class Transition(Struct, kw_only=True):
    """What an action led to. The observation is told to the model as a user message, after the results of its calls;
    None adds nothing. The reward is the turn's own; None gives it none."""

    observation: str | None = None
    reward: float | None = 0.0
    done: bool = False


class Episode(Struct, kw_only=True):
    """What a reward function gets to see. `answer` is what the model said last; "" if it was calling tools until the
    end. `turns` are the ids of all answers, `rewards` what they got of their own, `tokens` how many were sampled."""

    messages: list[Message]
    answer: str = ""
    calls: list[ExecutedCall] = field(default_factory=list[ExecutedCall])
    turns: list[str] = field(default_factory=list[str])
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    tokens: int = 0
    seconds: float = 0.0
    ended: Ended = "answered"


class EpisodeLimits(Struct, frozen=True, kw_only=True):
    """When an episode ends at the latest: model calls, tokens sampled by all of them, seconds. The clock runs from the
    first model call to the last reaction: making tools, `reset` and `close` are under `runner.timeout` alone."""

    max_turns: int = 8
    max_tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}. Fix: give a number above 0, or None for no limit")


async def play(
    llm: LLM,
    messages: Sequence[Message],
    tools: Tools,
    limits: EpisodeLimits,
    react: Callable[[Action], Awaitable[Transition]],
    reward: str,
) -> Episode:
    """Play one episode that begins with `messages`. Turns get what `react` gives them, under the name `reward`."""
    episode, began = Episode(messages=list(messages)), time.monotonic()
    async with llm.async_client() as client:
        clock = asyncio.timeout(limits.seconds)
        try:
            async with clock:
                episode.ended = await _turns(episode, _Model(llm, client, tools), tools, limits, react, reward)
        except TimeoutError:
            if not clock.expired():
                raise  # somebody else's
            episode.ended = "seconds"
    episode.seconds = time.monotonic() - began
    return episode


async def _turns(
    episode: Episode,
    model: _Model,
    tools: Tools,
    limits: EpisodeLimits,
    react: Callable[[Action], Awaitable[Transition]],
    reward: str,
) -> Ended:
    slots = asyncio.Semaphore(AT_ONCE)
    for _ in range(limits.max_turns):
        left = None if limits.max_tokens is None else limits.max_tokens - episode.tokens
        if left is not None and left <= 0:
            return "tokens"
        answer = await model.ask(episode.messages, left)
        if answer is None:
            return "context"
        episode.turns.append(answer.turn)
        episode.messages.append(answer.message)
        episode.tokens += answer.tokens
        episode.answer = "" if answer.calls else answer.text
        episode.calls += answer.calls
        try:
            await asyncio.gather(*(_run(call, tools, slots) for call in answer.calls))
        finally:  # also where the time is up: no call is left without its result
            episode.messages += [_result(call) for call in answer.calls]
        after = await react(Action(text=answer.text, calls=answer.calls, turn=answer.turn))
        if not isinstance(after, Transition):  # pyright: ignore[reportUnnecessaryIsInstance] (a user's function)
            raise AgentError(f"agent: step returned {type(after).__name__}. Fix: return strop.Transition(...)")
        if after.reward is not None:
            episode.rewards[answer.turn] = float(after.reward)
            model.llm.reward(reward, after.reward, turn=answer.turn)
        if after.observation is not None:
            episode.messages.append({"role": "user", "content": after.observation})
        if after.done:
            return "done"
        if not answer.calls and after.observation is None:  # there is nothing to go on from
            short = left is not None and answer.tokens >= left
            return "answered" if not answer.cut_off else "tokens" if short else "length"
    return "turns"


async def _run(call: ExecutedCall, tools: Tools, slots: asyncio.Semaphore) -> None:
    async with slots:
        began = time.monotonic()
        call.result = await tools.run(call.name, call.arguments)
        call.seconds = time.monotonic() - began


def _result(call: ExecutedCall) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": call.result.text}


# -- the model ---------------------------------------------------------------------------------------------------------


class _Answer(Struct, kw_only=True):
    turn: str
    message: Message
    text: str
    calls: list[ExecutedCall]
    tokens: int
    cut_off: bool


class _Model:
    """The model of one attempt, asked with the tools that it may call."""

    def __init__(self, llm: LLM, client: Any, tools: Tools) -> None:
        self.llm, self._client = llm, client
        self._more: dict[str, Any] = {"tools": tools.schemas} if tools.schemas else {}

    async def ask(self, messages: list[Message], left: int | None) -> _Answer | None:
        """An answer of at most `left` tokens; None if the conversation does not fit the model's context any more."""
        import openai

        more = self._more | ({} if left is None else {"max_tokens": left})
        try:
            said = await self._client.chat.completions.create(model=self.llm.model, messages=messages, **more)
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        choice = said.choices[0]
        calls = [
            ExecutedCall(id=call.id, name=call.function.name, arguments=call.function.arguments, turn=said.id)
            for call in choice.message.tool_calls or ()
        ]
        return _Answer(
            turn=said.id,
            message=choice.message.model_dump(exclude_none=True),
            text=choice.message.content or "",
            calls=calls,
            tokens=said.usage.completion_tokens if said.usage else 0,
            cut_off=choice.finish_reason == "length",
        )


# -- the beginning -----------------------------------------------------------------------------------------------------


def build_first_messages(task: Task, system: str, first: Any = None) -> list[Message]:
    """The messages an episode begins with: `first` as text or as messages, or else what the task asks.

    >>> build_first_messages(Task(id="t", data={"question": "3 * 4?", "answer": 12}), "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '3 * 4?'}]
    """
    asked = _question_of(task) if first is None else first
    said = [{"role": "user", "content": str(asked)}]
    own = list(cast("list[Message]", asked)) if isinstance(asked, list) else said
    return ([{"role": "system", "content": system}] if system else []) + own


def _question_of(task: Task) -> Any:
    given = task.data
    if isinstance(given, str):
        return given
    data = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if isinstance(data.get("messages"), list):
        return data["messages"]
    fields = text_fields(data)
    if not fields:
        raise TaskError(
            f"task {task.id} has no text that is clearly its question (question, prompt, messages, ...). Fix: "
            "say what it is with prompt=lambda task: ..."
        )
    return data[fields[0]]
