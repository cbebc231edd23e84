"""What is kept of turns, and which of those that said the same words a request goes on from.

Agents see words, but a context is more: the thoughts before them. A request may tell which turn an assistant's message
was, and every dialect hands out what it can be told by:

    turn                 responses' previous_response_id and the ids of items, the signature of Anthropic's thinking
    reasoning_content    thoughts that are sent back
    tool_calls           their ids: those that the gateway made belong to one turn

None of it need be there: agents drop thoughts and give calls ids of their own. But what is there must be so of every
answer in a context, or that context is not gone on from. White space in thoughts, and ids that the model wrote itself
and may write again, only speak for a context.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from msgspec import Struct

from strop.gateway.conversation import Conversation, call_ids
from strop.gateway.dialects.base import Json
from strop.gateway.template import Messages
from strop.types import Turn, stable_hash


class KnownAnswer(Struct, frozen=True):
    """What is known of an assistant's message in a context. `turn` is None if the agent put it there, and the model was
    shown what the template makes of it."""

    turn: str | None
    thought: str
    calls: tuple[str, ...]

    @classmethod
    def of(cls, message: Json, turn: str | None = None) -> KnownAnswer:
        thought = sys.intern(message.get("reasoning_content") or "")  # it comes again with every request
        return cls(turn, thought, call_ids(message))

    @classmethod
    def by(cls, turn: Turn) -> KnownAnswer:
        return cls.of(turn.answer, turn.id)

    def agrees(self, message: Json, made: Mapping[str, str]) -> int | None:
        """How much of what a message tells is the very same: its thoughts, the ids of its calls. None if it says that
        it is another's."""
        thought, ids = message.get("reasoning_content"), call_ids(message)
        if thought and thought != self.thought and _words(thought) not in ("", _words(self.thought)):
            return None
        named = message.get("turn")
        if self.turn is not None and named not in (None, self.turn):
            return None
        if self.turn is not None and ids != self.calls and any(made.get(id, self.turn) != self.turn for id in ids):
            return None
        return (bool(thought) and thought == self.thought) + (bool(ids) and ids == self.calls)


def _words(thought: str) -> str:
    """Clients strip thoughts and join their parts again: white space tells nothing."""
    return "".join(thought.split())


class KnownTurn(Struct, frozen=True, kw_only=True):
    """What is kept of a turn: its tokens and the hashes of its messages, of which long conversations have many copies.
    `number` is the last part of its id, `request` that of its request's first choice. `before` is the turn whose
    context it went on from; `heard` has the assistant's messages since then, by their place. `text` is a raw prompt's,
    with the answer, which begins at `said`."""

    id: str
    number: int
    request: int
    prompt_ids: list[int]
    response_ids: list[int]
    hashed: blake2b
    edges: list[bytes]
    before: str | None
    heard: dict[int, KnownAnswer]
    variables: Json = {}
    text: str | None = None
    said: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


def measure_agreement(
    turn: KnownTurn, turns: Mapping[str, KnownTurn], conversation: Conversation, made: Mapping[str, str]
) -> int | None:
    """How much of what a conversation tells is the very same in a turn's context; None if it contradicts it. `made` has
    the turns by the call ids that the gateway made for them.

    What was found is kept for conversations that go on from this one, unless it may change: an id that nobody made so
    far may yet be made."""
    agreed, at, final = 0, turn, True
    while (known := conversation.agreed.get(at.id)) is None:
        for place, said in at.heard.items():
            message = conversation.messages[place]
            agrees = said.agrees(message, made)
            if agrees is None:
                return None
            agreed += agrees
            final = final and call_ids(message) in ((), said.calls)
        if at.before is None:
            break
        at = turns[at.before]
    agreed += known or 0
    if final:
        conversation.agreed[turn.id] = agreed
    return agreed


def find_answers(messages: Messages, start: int) -> dict[int, KnownAnswer]:
    """The assistant's messages from `start` on, as an agent gives them."""
    return {
        place: KnownAnswer.of(messages[place])
        for place in range(start, len(messages))
        if messages[place]["role"] == "assistant"
    }


@lru_cache(4096)
def call_id(seed: int | None, position: int) -> str:
    """The id of a call for which the model wrote none: nine letters and digits, which is what the strictest chat
    templates want of it."""
    return f"{stable_hash(seed or 0, 'call', position):016x}"[-9:]


def find_made_ids(turn: Turn) -> list[str]:
    """The call ids of a turn that the gateway made."""
    ids: Sequence[str] = call_ids(turn.answer)
    return [id for i, id in enumerate(ids) if id == call_id(turn.sampling.seed, i)]
