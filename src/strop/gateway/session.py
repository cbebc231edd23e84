"""Exact prompts: what the model said is given back to it as the tokens it said it in.

A session belongs to one attempt and remembers every context it has served, per agent. A context is a conversation up to
and including an answer; its ids are the turn's prompt and response. A request that extends one gets those ids and the
tokens of the new messages:

    served      <|im_start|>user\\n3 * 4?<|im_end|>\\n<|im_start|>assistant\\n   +   12 . <|im_end|>
    request     user "3 * 4?", assistant "12.", user "And 5 * 6?"
    prompt      [the same ids ............................................]   +   \\n<|im_start|>user\\nAnd 5 * 6? ...

Otherwise the conversation is rendered whole, and the prompt says why it could not be extended. Contexts form a trie:
messages in a canonical form are its edges, and a node's key is the hash of the path to it.

Left out: keeping what the model said where a template rewrites history (thinking that is stripped, say); such a request
is a branch that shares the longest exact prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from strop.gateway.render import Messages, Renderer, Tools
from strop.types import Attempt, Rollout, Turn, stable_hash

Branch = Literal["edited_history", "changed_tools", "template_rewrote", "new_conversation"]


class Prompt(Struct, frozen=True, kw_only=True):
    """The ids an engine is given, and how they came about (see `Turn` for `parent`, `shared` and `branch`)."""

    ids: list[int]
    parent: str | None = None
    shared: int = 0
    branch: Branch | None = None


class Place(Struct, frozen=True, kw_only=True):
    """Where a request stands in the trie. `keys` has one key per leading message, `bare` the same leaving tools out;
    `opening` is the conversation up to its first message that is not the system's."""

    edges: list[bytes]
    keys: list[bytes]
    bare: list[bytes]
    opening: bytes

    @classmethod
    def of(cls, messages: Messages, tools: Tools) -> Place:
        edges = [canonical(message) for message in messages]
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(edges) - 1)
        return cls(
            edges=edges,
            keys=_keys(msgspec.json.encode(tools or [], order="sorted"), edges),
            bare=_keys(b"", edges),
            opening=b"\n".join(edges[: first + 1]),
        )


class Served(Struct, frozen=True, kw_only=True):
    """What is kept of a turn: its tokens, not its messages, of which long conversations have many copies."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]


class Contexts:
    """Every context served to one agent of a session."""

    def __init__(self) -> None:
        self._served: dict[bytes, Served] = {}  # a context's key -> the turn that ended it
        self._bare: set[bytes] = set()  # the same keys, leaving tools out
        self._openings: set[bytes] = set()
        self._answers: set[bytes] = set()  # answers in canonical form
        self._prompts: dict[bytes, Prompt] = {}  # a request's key -> the prompt it got, for when it comes again
        self._turns: list[Served] = []

    def prompt(self, renderer: Renderer, messages: Messages, tools: Tools, place: Place) -> Prompt:
        """The prompt for a request: recorded ids as far as they go. Raises `BadTemplate`."""
        if (again := self._prompts.get(place.keys[-1])) is not None:
            return again
        prompt = self._extended(renderer, messages, tools, place)
        if prompt is None:
            prompt = self._whole(renderer, messages, tools, self._reason(place))
        self._prompts[place.keys[-1]] = prompt
        return prompt

    def add(self, turn: Turn, place: Place) -> None:
        """Remember a recorded turn. What was not delivered whole cannot be extended, but its ids can be shared."""
        served = Served(id=turn.id, prompt_ids=turn.prompt_ids, response_ids=turn.response_ids)
        self._turns.append(served)
        self._openings.add(place.opening)
        self._prompts.setdefault(
            place.keys[-1], Prompt(ids=turn.prompt_ids, parent=turn.parent, shared=turn.shared, branch=_branch(turn))
        )
        if turn.abandoned:
            return
        answer = canonical(turn.answer)
        self._answers.add(answer)
        self._bare.add(_step(place.bare[-1], answer))
        key = _step(place.keys[-1], answer)
        # Of several turns with the same words an agent most likely goes on from the latest; among the choices of one
        # request, from the first.
        if not (turn.choice and key in self._served):
            self._served[key] = served

    def _extended(self, renderer: Renderer, messages: Messages, tools: Tools, place: Place) -> Prompt | None:
        served = _longest(place.keys, self._served)
        if not served:
            return None
        new = renderer.continuation(messages, tools, served)
        if new is None:
            return None
        turn = self._served[place.keys[served - 1]]
        path = turn.prompt_ids + turn.response_ids
        # The template closes the assistant's message; so did the model, unless it was cut off.
        new = new[1:] if path[-1] == renderer.end_of_turn else new
        return Prompt(ids=path + new, parent=turn.id, shared=len(path))

    def _whole(self, renderer: Renderer, messages: Messages, tools: Tools, branch: Branch | None) -> Prompt:
        ids = renderer.prompt(messages, tools)
        if branch is None:
            return Prompt(ids=ids)
        parent, shared = None, 0
        for turn in self._turns:
            length = common_prefix(turn.prompt_ids, ids)
            if length == len(turn.prompt_ids):
                length += common_prefix(turn.response_ids, ids[length:])
            if length > shared:
                parent, shared = turn.id, length
        return Prompt(ids=ids, parent=parent, shared=shared, branch=branch)

    def _reason(self, place: Place) -> Branch | None:
        if not self._turns:
            return None
        if _longest(place.keys, self._served):
            return "template_rewrote"
        if _longest(place.bare, self._bare):
            return "changed_tools"
        if place.opening in self._openings or not self._answers.isdisjoint(place.edges):
            return "edited_history"
        return "new_conversation"


class Session:
    """One attempt at the gateway: who may speak, what was said, and the numbers that seeds and ids are made of."""

    def __init__(self, rollout: Rollout, attempt: Attempt) -> None:
        self.rollout = rollout
        self.attempt = attempt
        self.in_flight = 0
        self._contexts: dict[str, Contexts] = {}
        self._num_turns = 0
        self._asked: Counter[int] = Counter()

    def contexts(self, agent: str) -> Contexts:
        return self._contexts.setdefault(agent, Contexts())

    def next_turn(self) -> str:
        """The id of the next turn: unique, and in the order requests began."""
        number = self._num_turns
        self._num_turns += 1
        return f"{self.rollout.id}/{self.attempt.number}/{number}"

    def next_seed(self, agent: str, prompt_ids: list[int]) -> int:
        """Fixes what is sampled: the rollout's seed, the agent, the prompt and how often it was asked before."""
        asked = stable_hash(agent, prompt_ids)
        ordinal = self._asked[asked]
        self._asked[asked] += 1
        return stable_hash(self.rollout.seed, agent, prompt_ids, ordinal)

    def add(self, turn: Turn, place: Place) -> None:
        self.contexts(turn.agent).add(turn, place)

    def restore(self, turns: Sequence[Turn]) -> None:
        """Take up an attempt that another gateway began: every context is in the store."""
        tools: dict[str | None, Tools] = {}
        for turn in turns:
            tools[turn.id] = tools[turn.parent] if extends(turn) else turn.requested.get("tools", [])
            self.add(turn, Place.of(turn.messages, tools[turn.id]))
            self._num_turns = max(self._num_turns, int(turn.id.rpartition("/")[2]) + 1)
            self._asked[stable_hash(turn.agent, turn.prompt_ids)] += 1


def extends(turn: Turn | Prompt) -> bool:
    """Whether this went on from its parent exactly; then the tools are the parent's too and need not be kept again."""
    return turn.parent is not None and turn.branch is None


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


def common_prefix(a: list[int], b: list[int]) -> int:
    """The number of leading ids two lists share.

    >>> common_prefix([1, 2, 3, 4], [1, 2, 9])
    2
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # compare by halves: slices of lists compare much faster than items in a loop
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _plain(value: Any) -> Any:
    """JSON values that are equal are written alike: 1.0 and 1 are one number to most languages."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _step(key: bytes, edge: bytes) -> bytes:
    return blake2b(key + edge, digest_size=16).digest()


def _keys(start: bytes, edges: Sequence[bytes]) -> list[bytes]:
    """The key of every prefix of a conversation."""
    keys: list[bytes] = []
    key = blake2b(start, digest_size=16).digest()
    for edge in edges:
        key = _step(key, edge)
        keys.append(key)
    return keys


def _longest(keys: list[bytes], known: dict[bytes, Served] | set[bytes]) -> int:
    """How many messages the longest known prefix has; 0 if none is known."""
    return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in known), 0)


def _branch(turn: Turn) -> Branch | None:
    return msgspec.convert(turn.branch, Branch | None)
