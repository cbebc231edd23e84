"""Turns and errors on their way into the store. An answer's last byte is sent after `record_turns` has returned."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from strop.errors import Fenced, StoreError
from strop.gateway.contexts import extends
from strop.gateway.dialects.base import ApiError
from strop.gateway.generate import Choice, ModelCall
from strop.gateway.session import Session
from strop.store.base import AttemptStore
from strop.types import Event, Finish, Turn


class Recorder:
    """Writes what happened, and counts it: turns, malformed_calls, abandoned, error, fenced,
    unrecorded, refused, refused/<code>, dropped, branch/<why>; outside models' turns as outside."""

    def __init__(self, store: AttemptStore) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    async def record_turns(self, call: ModelCall, finish: Finish | None = None) -> None:
        """Make a call's turns durable, one per choice, and known to its session. `finish` overrules that of the
        choices, for a call that was not delivered. Raises `Fenced`."""
        ended = time.time()
        turns = [_turn(call, choice, finish or choice.finish or "abandoned", ended) for choice in call.choices]
        await self._store.add_turns(turns)
        for turn, choice in zip(turns, call.choices, strict=True):
            call.session.add(turn, choice.conversation)
            self.counts["turns"] += 1
            if turn.abandoned:
                self.counts[turn.finish] += 1
            if turn.branch:
                self.counts[f"branch/{turn.branch}"] += 1
        self.counts["malformed_calls"] += sum(choice.malformed for choice in call.choices)

    async def record_undelivered(self, call: ModelCall, finish: Finish) -> None:
        """The same for a call nobody waits for any more; it may have been ended by the attempt's own end."""
        try:
            await self.record_turns(call, finish)
        except Fenced:
            self.counts["fenced"] += len(call.choices)
        except StoreError:  # the run ends by it; nobody waits for this turn any more
            self.counts["unrecorded"] += len(call.choices)

    async def record_proxied(self, turns: list[Turn]) -> None:
        """Make the turns of an outside model durable. Raises `Fenced`."""
        await self._store.add_turns(turns)
        for turn in turns:
            self.counts["outside"] += 1
            if turn.abandoned:
                self.counts[turn.finish] += 1

    async def record_dropped(self, session: Session, agent: str, dropped: Sequence[str]) -> None:
        """What the model is not told of, though an agent sent it."""
        self.counts["dropped"] += len(dropped)
        new = [why for why in dropped if (agent, why) not in session.told]
        session.told.update((agent, why) for why in new)
        for why in new:
            await self._record_event(session, "message", {"agent": agent, "stream": "gateway", "text": why})

    async def record_error(self, session: Session, agent: str, refused: ApiError) -> None:
        """An agent that gets an error may swallow it; it is recorded for people who look at the rollout."""
        self.counts["refused"] += 1
        if refused.code:
            self.counts[f"refused/{refused.code}"] += 1
        data = {"source": "gateway", "agent": agent, "status": refused.status, "message": refused.message}
        await self._record_event(session, "error", data | {"code": refused.code, "param": refused.param})

    async def _record_event(self, session: Session, kind: Literal["message", "error"], data: dict[str, Any]) -> None:
        event = Event(
            rollout=session.rollout.id, attempt=session.attempt.number, kind=kind, data=data, time=time.time()
        )
        with contextlib.suppress(StoreError):  # ended meanwhile, or the run is about to end by it
            await self._store.add_events([event])


def _turn(call: ModelCall, choice: Choice, finish: Finish, ended: float) -> Turn:
    prompt, requested = choice.prompt, call.request.requested
    if call.request.tools and not extends(prompt):
        requested = requested | {"tools": call.request.tools}
    if call.request.dropped:
        requested = requested | {"dropped": call.request.dropped}
    if choice.conversation.variables:
        requested = requested | {"chat_template_kwargs": choice.conversation.variables}
    if choice.conversation.lead:
        requested = requested | {"lead": choice.conversation.lead}
    return Turn(
        id=choice.turn,
        rollout=call.session.rollout.id,
        attempt=call.session.attempt.number,
        agent=call.agent,
        policy=call.route.policy,
        prompt_ids=prompt.ids,
        response_ids=choice.ids,
        logprobs=choice.logprobs,
        versions=choice.versions,
        sampling=choice.sampling,
        requested=requested,
        finish=finish,
        parent=prompt.parent,
        shared=prompt.shared,
        branch=prompt.branch,
        choice=choice.index,
        choices=len(call.choices),
        messages=list(choice.conversation.messages),
        answer=_answer(choice),
        started=call.started,
        ended=ended,
    )


def _answer(choice: Choice) -> dict[str, Any]:
    """The assistant's message as delivered, in the plain form of `ModelRequest.messages`."""
    answer: dict[str, Any] = {"role": "assistant", "content": choice.conversation.prefill + choice.text}
    if choice.reasoning:
        answer["reasoning_content"] = choice.reasoning
    if choice.calls:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    if choice.malformed:
        answer["malformed_calls"] = choice.malformed
    return answer
