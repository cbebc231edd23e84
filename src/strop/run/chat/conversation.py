"""A conversation with a model: what is said is one rollout, every model call one of its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import openai

from strop.agent.llm import LLM
from strop.errors import ContextOverflow, EngineError, StropError
from strop.run.chat.session import ChatAnswer, ChatSession, Show, TextDelta, ToolCallDone, ToolCallStarted
from strop.types import Lease, Task, Turn

DAY = 86_400.0


class Chat:
    """One conversation at a time. `run(name, arguments)` runs a call of one of `tools` and gives its result as text; a
    question may lead to `rounds` rounds of calls."""

    def __init__(
        self,
        session: ChatSession,
        *,
        system: str = "",
        tools: Sequence[dict[str, Any]] = (),
        run: Callable[[str, str], Awaitable[str]] | None = None,
        rounds: int = 8,
    ) -> None:
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self._session, self.tools, self._run, self._rounds = session, list(tools), run, rounds
        self._lease: Lease | None = None
        self._client: openai.AsyncOpenAI | None = None

    async def ask(self, text: str, show: Show) -> ChatAnswer:
        """Ask, run the calls the model makes, ask again until it answers. What fails or is cancelled leaves the
        conversation as it was. Raises `ContextOverflow` when it has become too long, `EngineError` for the rest."""
        if self._lease is None:
            await self._begin(text)
        assert self._lease is not None
        before, rollout = len(self.messages), self._lease.rollout.id
        turns: list[Turn] = []
        calls: list[ToolCallDone] = []
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(self._rounds):
                turns.append(await self._turn(show))
                self.messages.append(_spoken(turns[-1].answer))
                asked: list[dict[str, Any]] = self.messages[-1].get("tool_calls", [])
                if not asked or self._run is None:
                    return ChatAnswer(rollout=rollout, turns=turns, calls=calls)
                for call in asked:
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    show(ToolCallStarted(name, arguments))
                    calls.append(ToolCallDone(name, arguments, await self._run(name, arguments)))
                    show(calls[-1])
                    self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": calls[-1].result})
        except BaseException:
            del self.messages[before:]
            raise
        return ChatAnswer(rollout=rollout, turns=turns, calls=calls, open=True)

    async def reset(self, system: str | None = None) -> None:
        """End the conversation; the next question begins another, with another system message if one is given."""
        self.system = self.system if system is None else system
        self.messages.clear()
        if self._client is not None:
            await self._client.close()
        if self._lease is not None:
            ref, self._lease = (self._lease.attempt.rollout, self._lease.attempt.number), None
            await self._session.gateway.wait_until_idle(*ref)
            await self._session.store.finish(*ref)
            self._session.gateway.forget(ref[0])

    async def _begin(self, text: str) -> None:
        session = self._session
        await session.store.enqueue([session.rollout(Task(id="chat", split="chat", data={"prompt": text}))])
        (self._lease,) = await session.store.lease("chat", seconds=DAY)
        self._client = LLM.at(session.url, self._lease, model=session.config.policy.model).async_client()
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    async def _turn(self, show: Show) -> Turn:
        """One model call, shown as it is sampled; what was recorded of it."""
        assert self._client is not None
        assert self._lease is not None
        more: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        id = ""
        try:
            stream = await self._client.chat.completions.create(
                model=self._session.config.policy.model, messages=cast(Any, self.messages), stream=True, **more
            )
            async with stream:
                async for chunk in stream:
                    id = chunk.id
                    for choice in chunk.choices:
                        if thought := getattr(choice.delta, "reasoning_content", None):
                            show(TextDelta(thought, thought=True))
                        if choice.delta.content:
                            show(TextDelta(choice.delta.content))
        except openai.APIError as error:
            raise _told(error, self._session.engine.context) from error
        turns = await self._session.store.turns(self._lease.rollout.id)
        return next(turn for turn in turns if turn.id == id)


def _spoken(answer: dict[str, Any]) -> dict[str, Any]:
    """A recorded answer as requests say it again: arguments of calls as text."""
    message = {key: value for key, value in answer.items() if key in ("role", "content", "reasoning_content")}
    calls: list[dict[str, Any]] = []
    for call in answer.get("tool_calls", ()):
        arguments = msgspec.json.encode(call["function"]["arguments"]).decode()
        calls.append(call | {"function": {"name": call["function"]["name"], "arguments": arguments}})
    return message | ({"tool_calls": calls} if calls else {})


def _told(error: openai.APIError, context: int) -> StropError:
    if error.code == "context_length_exceeded":
        return ContextOverflow(
            f"the conversation does not fit the model's context of {context} tokens any more. Fix: /reset begins "
            "another"
        )
    body = cast(Any, error.body)
    said: str | None = cast(dict[str, Any], body).get("message") if isinstance(body, dict) else None
    return EngineError(f"the model gave no answer: {said or error.message}")
