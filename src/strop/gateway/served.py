"""What is kept of turns, and which of those that said the same words a request goes on from.

Agents see words, but a context is more: the thoughts before them. A request may tell which turn an assistant's message
was, and every dialect hands out what it can be told by:

    turn                 responses' previous_response_id and the ids of items, the signature of Anthropic's thinking
    reasoning_content    thoughts that are sent back
    tool_calls           their ids: those that the gateway made belong to one turn

None of it need be there: agents drop thoughts and give calls ids of their own. But what is there must be so of every
answer in a context, or that context is not gone on from. Ids that the model wrote itself are no names, for a model may
write them again; they only speak for a context.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from msgspec import Struct

from strop.gateway.asked import call_ids
from strop.gateway.dialects.base import Json
from strop.gateway.render import Messages
from strop.types import Turn, stable_hash


class Said(Struct, frozen=True):
    """What is known of an assistant's message in a context. `turn` is None if the agent put it there, and the model was
    shown what the template makes of it."""

    turn: str | None
    thought: str
    calls: tuple[str, ...]

    @classmethod
    def of(cls, message: Json, turn: str | None = None) -> Said:
        thought = sys.intern(message.get("reasoning_content") or "")  # it comes again with every request
        return cls(turn, thought, call_ids(message))

    @classmethod
    def by(cls, turn: Turn) -> Said:
        return cls.of(turn.answer, turn.id)

    def agrees(self, message: Json, made: Mapping[str, str]) -> bool | None:
        """None if a message says that it is another's. Otherwise whether its calls have the very ids."""
        thought = message.get("reasoning_content")
        if thought and thought != self.thought and thought.strip() not in ("", self.thought.strip()):
            return None
        named = message.get("turn")
        if named is not None and self.turn not in (None, named):
            return None
        if not message.get("tool_calls"):
            return False
        ids = call_ids(message)
        if ids == self.calls:
            return True
        return None if self.turn and any(made.get(id, self.turn) != self.turn for id in ids) else False


class Served(Struct, frozen=True, kw_only=True):
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
    heard: dict[int, Said]
    variables: Json = {}
    text: str | None = None
    said: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


def agreement(turn: Served, turns: Mapping[str, Served], messages: Messages, made: Mapping[str, str]) -> int | None:
    """How many answers of a turn's context have the very call ids that `messages` say; None if these contradict it.
    `made` has the turns by the call ids that the gateway made for them."""
    agreed, at = 0, turn
    while True:
        for place, said in at.heard.items():
            agrees = said.agrees(messages[place], made)
            if agrees is None:
                return None
            agreed += agrees
        if at.before is None:
            return agreed
        at = turns[at.before]


def spoken(messages: Messages, start: int) -> dict[int, Said]:
    """The assistant's messages from `start` on, as an agent gives them."""
    return {
        place: Said.of(messages[place])
        for place in range(start, len(messages))
        if messages[place]["role"] == "assistant"
    }


def call_id(seed: int | None, position: int) -> str:
    """The id of a call for which the model wrote none: nine letters and digits, which is what the strictest chat
    templates want of it."""
    return f"{stable_hash(seed or 0, 'call', position):016x}"[-9:]


def made_ids(turn: Turn) -> list[str]:
    """The call ids of a turn that the gateway made."""
    ids: Sequence[str] = call_ids(turn.answer)
    return [id for i, id in enumerate(ids) if id == call_id(turn.sampling.seed, i)]
