"""A conversation that wants an answer, and where it stands among those served before.

Messages are compared by what they mean to a model. Each has an edge, which is the hash of its canonical form, and every
leading part of a conversation a key, which is the hash of the path to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec
from msgspec import Struct

from strop.gateway.dialects.base import Json
from strop.gateway.dialects.chat_messages import LONGEST, REMEMBERED
from strop.gateway.template import Messages, Tools


class Asked(Struct, frozen=True, kw_only=True):
    """`edges` has one edge per message, `keys` one key per leading message. `context` is the key of the whole with what
    the request says besides of the answers in it: whose they are, which thoughts led to them, the ids of their calls.

    `lead` is the beginning of the answer where that is given: by the agent (its own words are `prefill`), or to make
    the model call a tool. `variables` are what the chat template is given besides: with others it is another context.
    A raw prompt is a conversation of one message whose role is "prompt".
    """

    messages: Messages
    tools: Tools
    variables: Json
    lead: str
    prefill: str
    edges: list[bytes]
    keys: list[bytes]
    context: bytes

    @classmethod
    def of(
        cls, messages: Messages, tools: Tools, *, variables: Json | None = None, lead: str = "", prefill: str = ""
    ) -> Asked:
        (edges, told), variables = _read(messages), variables or {}
        start = msgspec.json.encode([tools or [], variables] if variables else tools or [], order="sorted")
        keys = _keys(start, edges)
        return cls(
            messages=messages,
            tools=tools,
            variables=variables,
            lead=lead,
            prefill=prefill,
            edges=edges,
            keys=keys,
            context=step(keys[-1], told) if told else keys[-1],
        )

    @classmethod
    def raw(cls, prompt: str | list[int]) -> Asked:
        return cls.of([{"role": "prompt", "content": prompt}], None)

    @property
    def key(self) -> bytes:
        return step(self.context, self.lead.encode()) if self.lead else self.context


def call_ids(message: Json) -> tuple[str, ...]:
    return tuple([call["id"] for call in message.get("tool_calls") or ()])


def _read(messages: Messages) -> tuple[list[bytes], bytes]:
    """The edges of a conversation, and what it tells of its answers.

    A tool's message names the call it answers by where that stands, as seen from the result: agents may give calls new
    ids with every request, or forget what came before. Of several calls with one id it is the last."""
    places: dict[str, Place] = {}
    edges: list[bytes] = []
    told: list[bytes] = []
    num_calling = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            num_calling += 1
            for i, call in enumerate(calls):
                places[call["id"]] = num_calling, i
        asked = places.get(message.get("tool_call_id") or "")
        edge, tells = _known_of(message, asked and (num_calling - asked[0], asked[1]))
        edges.append(edge)
        told.append(tells or b"-")
    return edges, b"".join(told) if any(tells != b"-" for tells in told) else b""


Place = tuple[int, int]
"""How many messages with calls back from the last one a call stands, and which of that message's calls it is."""

_known: dict[tuple[int, Place | None], tuple[Json, bytes, bytes]] = {}
"""Messages that were seen, with their edges and what they tell: dialects give out one object for the same bytes."""


def edge_of(message: Json) -> bytes:
    """The first letter of the role, and a hash."""
    return _known_of(message, None)[0]


def _known_of(message: Json, place: Place | None) -> tuple[bytes, bytes]:
    """A message's edge, and a hash of what it tells besides of an answer. `place` is that of the call which a tool's
    message answers."""
    found = _known.get((id(message), place))
    if found is not None and found[0] is message:
        return found[1], found[2]
    canon = canonical(message if place is None else message | {"tool_call_id": place})
    edge, tells, length = canon[2:3] + blake2b(canon, digest_size=16).digest(), b"", len(canon)
    if message["role"] == "assistant":
        parts = (message.get("turn"), message.get("reasoning_content"), call_ids(message))
        if any(parts):
            written = msgspec.json.encode(parts)
            tells, length = blake2b(written, digest_size=16).digest(), length + len(written)
    if length <= LONGEST:
        if len(_known) >= 2 * REMEMBERED:
            _known.clear()
        _known[id(message), place] = message, edge, tells
    return edge, tells


def canonical(message: dict[str, Any]) -> bytes:
    """What makes two messages the same to a model: who speaks, the text, the calls with their arguments as JSON values.

    Ids of calls, reasoning and keys of frameworks' own are left out of assistant messages: agents drop and rename them.

    >>> canonical({"role": "assistant", "content": None}) == canonical({"role": "assistant", "content": "", "id": 7})
    True
    """
    calls = [
        (call["function"]["name"], _plain(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]
    parts: list[Any] = [message["role"], message.get("content") or "", calls]
    if message["role"] != "assistant":
        parts += [message.get("name"), message.get("tool_call_id")]
    return msgspec.json.encode(parts, order="sorted")


def _plain(value: Any) -> Any:
    """JSON values that are equal are written alike: 1.0 and 1 are one number to most languages."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def step(key: bytes, edge: bytes) -> bytes:
    return blake2b(key + edge, digest_size=16).digest()


def _keys(start: bytes, edges: Sequence[bytes]) -> list[bytes]:
    """The key of every prefix of a conversation."""
    keys: list[bytes] = []
    key = blake2b(start, digest_size=16).digest()
    for edge in edges:
        key = step(key, edge)
        keys.append(key)
    return keys
