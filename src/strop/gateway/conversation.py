"""A conversation that wants an answer, and where it stands among those served before.

Messages are compared by what they mean to a model. Each has an edge, which is the hash of its canonical form, and every
leading part of a conversation a key, which is the hash of the path to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from operator import is_
from typing import Any, cast

import msgspec
from msgspec import Struct

from strop.gateway.dialects.base import Json
from strop.gateway.dialects.chat_messages import LONGEST, REMEMBERED
from strop.gateway.dialects.fields import find_facts
from strop.gateway.template import Messages, Tools


class Conversation(Struct, frozen=True, kw_only=True):
    """`edges` has one edge per message, `keys` one key per leading message. `context` is the key of the whole with what
    the request says besides of the answers in it: whose they are, which thoughts led to them, the ids of their calls.

    `lead` is the beginning of the answer where that is given: by the agent (its own words are `prefill`), or to make
    the model call a tool. `variables` are what the chat template is given besides: with others it is another context.
    A raw prompt is a conversation of one message whose role is "prompt".

    The rest is for longer conversations that begin with the very same messages: `start` is the hash of tools and
    variables, `tells` what each message tells of an answer, `calls` has the places of tool calls by their ids.
    `num_told` counts, up to each message, what answers can be recognised by; `agreed` how much of it was found to be
    the same in the contexts of some turns. `num_chars` and `longest_thought` say how much text there is at most.
    """

    messages: Messages
    tools: Tools
    variables: Json
    lead: str
    prefill: str
    edges: list[bytes]
    keys: list[bytes]
    context: bytes
    start: bytes
    tells: bytes
    calls: dict[str, Place]
    num_calling: int
    num_told: list[int]
    num_chars: int
    longest_thought: int
    agreed: dict[str, int]

    @classmethod
    def of(
        cls,
        messages: Messages,
        tools: Tools,
        *,
        variables: Json | None = None,
        lead: str = "",
        prefill: str = "",
        earlier: Iterable[Conversation] = (),
    ) -> Conversation:
        """`earlier` are conversations that this one may go on from: what is known of them is not found out again."""
        variables = variables or {}
        start, num_chars = _begin(tools, variables)
        defaults = find_defaults(tools)
        base = next((one for one in earlier if one.start == start and one.is_begun_by(messages)), None)
        edges = [] if base is None else base.edges.copy()
        keys = [] if base is None else base.keys.copy()
        calls = {} if base is None else base.calls.copy()
        num_told = [] if base is None else base.num_told.copy()
        tells = [] if base is None else [base.tells]
        num_calling, told, key = (base.num_calling, num_told[-1], keys[-1]) if base else (0, 0, start)
        num_chars, thought = (base.num_chars, base.longest_thought) if base else (num_chars, 0)
        for message in messages[len(edges) :]:
            if made := message.get("tool_calls"):
                num_calling += 1
                for i, call in enumerate(made):
                    calls[call["id"]] = num_calling, i
            # A tool's message names the call it answers by where that stands, as seen from the result: agents may give
            # calls new ids with every request, or forget what came before. Of several with one id it is the last.
            asked = calls.get(message.get("tool_call_id") or "")
            known = _known_of(message, asked and (num_calling - asked[0], asked[1]), defaults)
            key, told = step(key, known.edge), told + known.num_told
            edges.append(known.edge)
            keys.append(key)
            tells.append(known.tells)
            num_told.append(told)
            num_chars += known.num_chars
            thought = max(thought, known.num_thought)
        joined = b"".join(tells)
        return cls(
            messages=messages,
            tools=tools,
            variables=variables,
            lead=lead,
            prefill=prefill,
            edges=edges,
            keys=keys,
            context=step(key, joined) if len(joined) > len(edges) else key,
            start=start,
            tells=joined,
            calls=calls,
            num_calling=num_calling,
            num_told=num_told,
            num_chars=num_chars,
            longest_thought=thought,
            agreed={} if base is None else base.agreed.copy(),
        )

    @classmethod
    def raw(cls, prompt: str | list[int]) -> Conversation:
        return cls.of([{"role": "prompt", "content": prompt}], None)

    @property
    def key(self) -> bytes:
        return step(self.context, self.lead.encode()) if self.lead else self.context

    def is_begun_by(self, messages: Messages) -> bool:
        """Whether all of this stands at the beginning of `messages`: the very objects, since Python takes True for 1.
        Dialects give out one object for the same bytes."""
        mine = self.messages
        if len(mine) > len(messages) or mine[-1] is not messages[len(mine) - 1]:
            return False
        return all(map(is_, mine, messages))


def _begin(tools: Tools, variables: Json) -> tuple[bytes, int]:
    """The hash of tools and variables, and how many characters they have at least."""
    facts = None if variables else find_facts(tools)
    if facts and "start" in facts:
        return facts["start"]
    encoded = msgspec.json.encode([tools or [], variables] if variables else tools or [], order="sorted")
    start = blake2b(encoded, digest_size=16).digest()
    if facts is not None:
        facts["start"] = start, len(encoded)
    return start, len(encoded)


def call_ids(message: Json) -> tuple[str, ...]:
    return tuple([call["id"] for call in message.get("tool_calls") or ()])


Place = tuple[int, int]
"""How many messages with calls back from the last one a call stands, and which of that message's calls it is."""


class KnownMessage(Struct, frozen=True):
    """What was found out about a message. `edge` is the first letter of its role, and a hash. `tells` is a hash of what
    it tells besides of an answer, or else a dash, in `num_told` ways. `num_chars` is at least as much as
    its text and its calls have, `num_thought` what its thoughts have, which templates may leave out."""

    message: Json
    edge: bytes
    tells: bytes
    num_told: int
    num_chars: int
    num_thought: int


_known: dict[tuple[int, Place | None], KnownMessage] = {}
"""Messages that were seen: dialects give out one object for the same bytes."""


def make_edge(message: Json, tools: Tools) -> bytes:
    """The edge of a message that is not a tool's, in a conversation with these tools."""
    return _hash_canon(canonicalize(leave_out_defaults(message, find_defaults(tools))))


def _hash_canon(canon: bytes) -> bytes:
    return canon[2:3] + blake2b(canon, digest_size=16).digest()


def _known_of(message: Json, place: Place | None, defaults: Mapping[str, Json]) -> KnownMessage:
    """`place` is that of the call which a tool's message answers."""
    if (plain := leave_out_defaults(message, defaults)) is not message:
        return _find_out(plain, None)  # with other tools it is another: it is not kept
    found = _known.get((id(message), place))
    if found is not None and found.message is message:
        return found
    known = _find_out(message, place)
    if known.num_chars + known.num_thought <= LONGEST:
        if len(_known) >= 2 * REMEMBERED:
            _known.clear()
        _known[id(message), place] = known
    return known


def _find_out(message: Json, place: Place | None) -> KnownMessage:
    canon = canonicalize(message if place is None else message | {"tool_call_id": place})
    tells, thought, calls = b"-", message.get("reasoning_content"), message.get("tool_calls")
    if message["role"] == "assistant":
        parts = (message.get("turn"), thought, call_ids(message))
        if any(parts):
            tells = blake2b(msgspec.json.encode(parts), digest_size=16).digest()
    num_told, num_thought = bool(thought) + bool(calls), len(thought or "")
    return KnownMessage(message, _hash_canon(canon), tells, num_told, len(canon), num_thought)


def find_defaults(tools: Tools) -> dict[str, Json]:
    """The arguments that tools take when they are left out, by tool: what their schemas say.

    >>> find_defaults([{"function": {"name": "edit", "parameters": {"properties": {"all": {"default": False}}}}}])
    {'edit': {'all': False}}
    """
    facts = find_facts(tools)
    if facts and "defaults" in facts:
        return facts["defaults"]
    functions: list[Json] = [tool["function"] for tool in tools or [] if isinstance(tool.get("function"), dict)]
    found = {str(function.get("name")): given for function in functions if (given := _read_defaults(function))}
    if facts is not None:
        facts["defaults"] = found
    return found


def _read_defaults(function: Json) -> Json:
    schema = _as_table(function.get("parameters"))
    about = {name: _as_table(one) for name, one in _as_table(schema.get("properties")).items()}
    return {name: one["default"] for name, one in about.items() if "default" in one}


def _as_table(value: Any) -> Json:
    return cast(Json, value) if isinstance(value, dict) else {}


def leave_out_defaults(message: Json, defaults: Mapping[str, Json]) -> Json:
    """The same call with or without an argument's default is one to a model that was shown the schema. Some agents
    write defaults into the calls that they send back."""
    calls = message.get("tool_calls") if defaults else None
    plain = [_leave_out(call, defaults.get(call["function"]["name"])) for call in calls or ()]
    return message if all(map(is_, plain, calls or ())) else message | {"tool_calls": plain}


def _leave_out(call: Json, defaults: Json | None) -> Json:
    arguments = call["function"]["arguments"]
    if not defaults or not isinstance(arguments, dict):
        return call
    given = cast(Json, arguments)
    kept = {name: value for name, value in given.items() if name not in defaults or not _same(value, defaults[name])}
    return call if len(kept) == len(given) else call | {"function": call["function"] | {"arguments": kept}}


def _same(one: Any, other: Any) -> bool:
    """As JSON, in which True is not 1."""
    return msgspec.json.encode(_plain(one), order="sorted") == msgspec.json.encode(_plain(other), order="sorted")


def join_text(message: Json) -> str:
    """What a message says in words and in calls."""
    content = message["content"] if isinstance(message["content"], str) else ""  # else a raw prompt's ids
    calls = message.get("tool_calls")
    return content + msgspec.json.encode([call["function"] for call in calls]).decode() if calls else content


def canonicalize(message: dict[str, Any]) -> bytes:
    """What makes two messages the same to a model: who speaks, the text, the calls with their arguments as JSON values.

    Ids of calls, reasoning and keys of frameworks' own are left out of assistant messages: agents drop and rename them.

    >>> one, other = {"role": "assistant", "content": None}, {"role": "assistant", "content": "", "id": 7}
    >>> canonicalize(one) == canonicalize(other)
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
