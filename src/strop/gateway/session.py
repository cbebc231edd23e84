"""Exact prompts: what the model said is given back to it as the tokens it said it in.

A session belongs to one attempt and remembers every context it has served, per agent. A context is a conversation up to
and including an answer; its ids are the turn's prompt and response. A request that extends one gets those ids and the
tokens of the new messages:

    served      <|im_start|>user\\n3 * 4?<|im_end|>\\n<|im_start|>assistant\\n   +   12 . <|im_end|>
    request     user "3 * 4?", assistant "12.", user "And 5 * 6?"
    prompt      [the same ids ............................................]   +   \\n<|im_start|>user\\nAnd 5 * 6? ...

Otherwise the conversation is rendered whole, and the prompt says why it could not be extended. Contexts form a trie
whose edges are messages, as `Asked` has them.

That is `history = "sampled"`. With `history = "template"` the model sees what a stock server would show it when it is
deployed: where the template writes what was said otherwise (thinking that is stripped, say), a branch begins that
shares the longest exact prefix.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.gateway.asked import Asked, edge_of, step
from strop.gateway.dialects.base import Json
from strop.gateway.render import Renderer, Tools
from strop.types import Attempt, Rollout, Turn

Branch = Literal[
    "edited_history",
    "dropped_tool_result",
    "truncated",
    "changed_system",
    "changed_tools",
    "changed_kwargs",
    "template_rewrote",
    "new_conversation",
]
History = Literal["sampled", "template"]


class Prompt(Struct, frozen=True, kw_only=True):
    """The ids an engine is given, and how they came about (see `Turn` for `parent`, `shared` and `branch`)."""

    ids: list[int]
    parent: str | None = None
    shared: int = 0
    branch: Branch | None = None
    hashed: blake2b | None = None


class Served(Struct, frozen=True, kw_only=True):
    """What is kept of a turn: its tokens and the hashes of its messages, of which long conversations have many copies.
    `number` is the last part of its id, `request` that of its request's first choice. `text` is a raw prompt's, with
    the answer, which begins at `said`."""

    id: str
    number: int
    request: int
    prompt_ids: list[int]
    response_ids: list[int]
    hashed: blake2b
    edges: list[bytes]
    variables: Json = {}
    text: str | None = None
    said: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


class Contexts:
    """Every context served to one agent of a session by one policy. In which order turns are added does not matter:
    requests overlap, and end in another order than they began."""

    def __init__(self, start: bytes) -> None:
        self._start = blake2b(start, digest_size=8)
        self._served: dict[bytes, Served] = {}  # a context's key -> the turn that ended it
        self._gone_on: dict[str, set[bytes]] = {}  # a turn -> the hashes of messages that followed it
        self._prompts: dict[bytes, Prompt] = {}  # a request's key -> the prompt it got, for when it comes again
        self._turns: list[Served] = []  # by number
        self._by_id: dict[str, Served] = {}

    def prompt(
        self, renderer: Renderer, asked: Asked, history: History = "sampled", *, remember: bool = True
    ) -> Prompt:
        """The prompt for a request: recorded ids as far as they go. The same request gets the same one again, unless
        it was only asked about. Raises `BadTemplate`."""
        if (again := self._prompts.get(asked.key)) is not None:
            return again
        if (begun := self._prompts.get(asked.keys[-1])) is not None:  # asked before, without this lead
            prompt = begun
        elif asked.messages[0]["role"] == "prompt":
            prompt = self._raw(renderer, asked.messages[0]["content"])
        elif history == "template":
            prompt = self._rendered(renderer, asked)
        else:
            prompt = self._extended(renderer, asked) or self._whole(renderer, asked)
        if asked.lead:
            prompt = replace(prompt, ids=prompt.ids + renderer.encode_after(prompt.ids, asked.lead))
        prompt = replace(prompt, hashed=self._hashed(prompt))
        if remember:
            self._prompts[asked.key] = prompt
        return prompt

    def hashed(self, turn: str) -> blake2b:
        """The hash of a turn's prompt."""
        return self._by_id[turn].hashed

    def _hashed(self, prompt: Prompt) -> blake2b:
        """The hash of a prompt goes on from its parent's: a long conversation costs what its new tokens cost."""
        parent = self._by_id.get(prompt.parent or "")
        if parent is None or not parent.prompt_ids or prompt.shared < len(parent.prompt_ids):
            hashed, new = self._start.copy(), msgspec.json.encode(prompt.ids)[1:-1]
        else:
            hashed, new = parent.hashed.copy(), msgspec.json.encode(prompt.ids[len(parent.prompt_ids) :])[1:-1]
            new = new and b"," + new
        hashed.update(new)
        return hashed

    def add(self, turn: Turn, asked: Asked) -> None:
        """Remember a recorded turn. What was not delivered whole cannot be extended, but its ids can be shared."""
        raw = asked.messages[0]["role"] == "prompt"
        prompt = asked.messages[0]["content"] if raw else None
        answer, said = edge_of(turn.answer), turn.answer["content"]
        seen = self._prompts.get(asked.key)
        if seen is None:
            seen = Prompt(ids=turn.prompt_ids, parent=turn.parent, shared=turn.shared, branch=_branch(turn))
            seen = self._prompts[asked.key] = replace(seen, hashed=self._hashed(seen))
        number = _number(turn.id)
        served = Served(
            id=turn.id,
            number=number,
            request=number - turn.choice,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            hashed=cast(blake2b, seen.hashed),
            edges=[*asked.edges, answer],
            variables=asked.variables,
            text=prompt + said if isinstance(prompt, str) and said and not turn.abandoned else None,
            said=len(prompt or ""),
        )
        insort(self._turns, served, key=lambda turn: turn.number)
        if (parent := self._by_id.get(turn.parent or "")) and served.edges[: len(parent.edges)] == parent.edges:
            self._gone_on.setdefault(parent.id, set()).update(served.edges[len(parent.edges) : -1][:1])
        self._by_id[turn.id] = served
        if turn.abandoned or raw:
            return
        key = step(asked.keys[-1], answer)
        # Of several turns with the same words an agent most likely goes on from the latest; among the choices of one
        # request, from the first.
        known = self._served.get(key)
        if known is None or (known.request, -known.number) < (served.request, -served.number):
            self._served[key] = served

    def _extended(self, renderer: Renderer, asked: Asked) -> Prompt | None:
        """What the model said stays as it said it, whatever the template makes of it now."""
        served = _longest(asked.keys, self._served)
        if not served:
            return None
        turn = self._served[asked.keys[served - 1]]
        path = turn.ids
        new = renderer.continuation(asked.messages, asked.tools, served, path)
        if new is None:
            return None
        return Prompt(ids=path + new, parent=turn.id, shared=len(path), branch=self._fork(turn, asked, served))

    def _fork(self, turn: Served, asked: Asked, served: int) -> Branch | None:
        """Why this is not simply the conversation going on: another request went on from here with other words, or
        the agent puts words into the model's mouth."""
        new = asked.edges[served:]
        if not new:
            return None
        gone_on = self._gone_on.get(turn.id)
        same = not gone_on or new[0] in gone_on
        said = any(message["role"] == "assistant" for message in asked.messages[served:])
        return None if same and not said else self._why(asked)

    def _rendered(self, renderer: Renderer, asked: Asked) -> Prompt:
        """What a stock server would show the model: recorded ids as long as the template writes their very text."""
        text = renderer.text(asked.messages, asked.tools, generate=True)
        served = _longest(asked.keys, self._served)
        if served:
            turn = self._served[asked.keys[served - 1]]
            shown, said = text, renderer.decode(turn.ids)
            if not shown.startswith(said):
                shown = renderer.decode(renderer.encode(text))  # some tokenizers normalise what they are given
            if shown.startswith(said):
                ids = turn.ids + renderer.encode_after(turn.ids, shown[len(said) :])
                return Prompt(ids=ids, parent=turn.id, shared=len(turn.ids), branch=self._fork(turn, asked, served))
        return self._branch(renderer.encode(text), self._reason(asked))

    def _whole(self, renderer: Renderer, asked: Asked) -> Prompt:
        return self._branch(renderer.prompt(asked.messages, asked.tools), self._reason(asked))

    def _branch(self, ids: list[int], branch: Branch | None) -> Prompt:
        """Ids that extend no context share the longest exact prefix with one."""
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

    def _raw(self, renderer: Renderer, prompt: str | list[int]) -> Prompt:
        """A raw prompt extends the one whose text, with its answer, it begins with."""
        if not isinstance(prompt, str):
            found = self._branch(prompt, "new_conversation" if self._turns else None)
            turn = self._by_id.get(found.parent or "")
            goes_on = turn is not None and found.shared >= len(turn.prompt_ids) + len(_spoken(renderer, turn))
            return replace(found, branch=None) if goes_on else found
        texts = [turn for turn in self._turns if turn.text and prompt.startswith(turn.text)]
        if texts:
            turn = max(texts, key=lambda turn: len(turn.text or ""))
            said, text = _spoken(renderer, turn), prompt[turn.said :]
            while not text.startswith(renderer.spoken(said)):  # a stop string, which the agent was not shown
                said = said[:-1]
            path, rest = turn.prompt_ids + said, text[len(renderer.spoken(said)) :]
            return Prompt(ids=path + renderer.encode_after(path, rest), parent=turn.id, shared=len(path))
        return self._branch(renderer.encode(prompt), "new_conversation" if self._turns else None)

    def _reason(self, asked: Asked) -> Branch | None:
        if not self._turns:
            return None
        if _longest(asked.keys, self._served):
            return "template_rewrote"
        same = [turn for turn in self._served.values() if asked.edges[: len(turn.edges)] == turn.edges]
        # Or the same words, and they were no answer's.
        same = same or [turn for turn in self._turns if asked.edges == turn.edges[:-1]]
        if same:
            return "changed_tools" if any(turn.variables == asked.variables for turn in same) else "changed_kwargs"
        return self._why(asked)

    def _why(self, asked: Asked) -> Branch:
        """How a conversation differs from the one served before that is most like it."""
        now = set(asked.edges)
        before = max(self._turns, key=lambda turn: len(now.intersection(turn.edges))).edges
        (old_system, old), (new_system, new) = _parts(before), _parts(asked.edges)
        kept = [edge for edge in old if edge in new]
        if not kept:
            return "new_conversation"
        if old_system != new_system:
            return "changed_system"
        if new[: len(kept)] != kept or old[: len(kept)] == kept:  # it stands elsewhere, or something else in its place
            return "edited_history"
        gone = [edge for edge in old[: old.index(kept[-1])] if edge not in kept]
        return "dropped_tool_result" if all(edge.startswith(b"t") for edge in gone) else "truncated"


class Session:
    """One attempt at the gateway: who may speak, what was said, and the numbers that seeds and ids are made of."""

    def __init__(self, rollout: Rollout, attempt: Attempt) -> None:
        self.rollout = rollout
        self.attempt = attempt
        self.in_flight = 0
        self._contexts: dict[tuple[str, str], Contexts] = {}
        self._num_turns = 0
        self._asked: Counter[tuple[str, bytes]] = Counter()

    def contexts(self, agent: str, policy: str) -> Contexts:
        """One agent may speak to several policies, whose tokens are not each other's."""
        key = (agent, policy)
        if key not in self._contexts:
            self._contexts[key] = Contexts(b"[%d,%b,[" % (self.rollout.seed, msgspec.json.encode(agent)))
        return self._contexts[key]

    def next_turn(self) -> str:
        """The id of the next turn: unique, and in the order requests began."""
        number = self._num_turns
        self._num_turns += 1
        return f"{self.rollout.id}/{self.attempt.number}/{number}"

    def next_seed(self, agent: str, prompt: Prompt) -> int:
        """Fixes what is sampled: `stable_hash` of the rollout's seed, the agent, the prompt's ids and how often they
        were asked before."""
        hashed = cast(blake2b, prompt.hashed).copy()
        asked = (agent, hashed.digest())
        hashed.update(b"],%d]" % self._asked[asked])
        self._asked[asked] += 1
        return int.from_bytes(hashed.digest(), "big") >> 1

    def add(self, turn: Turn, asked: Asked) -> None:
        self.contexts(turn.agent, turn.policy).add(turn, asked)

    def restore(self, turns: Sequence[Turn]) -> None:
        """Take up an attempt that another gateway began: every context is in the store."""
        tools: dict[str | None, Tools] = {}
        for turn in sorted(turns, key=lambda turn: _number(turn.id)):  # whatever clocks say
            self._num_turns = max(self._num_turns, _number(turn.id) + 1)
            if turn.outside:
                continue
            tools[turn.id] = tools[turn.parent] if extends(turn) else turn.requested.get("tools", [])
            variables, lead = turn.requested.get("chat_template_kwargs"), turn.requested.get("lead", "")
            self.add(turn, Asked.of(turn.messages, tools[turn.id], variables=variables, lead=lead))
            hashed = self.contexts(turn.agent, turn.policy).hashed(turn.id)
            self._asked[turn.agent, hashed.digest()] += 1


def extends(turn: Turn | Prompt) -> bool:
    """Whether this went on from its parent exactly; then the tools are the parent's too and need not be kept again."""
    return turn.parent is not None and turn.branch is None


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


def _longest(keys: list[bytes], known: dict[bytes, Served]) -> int:
    """How many messages the longest known prefix has; 0 if none is known."""
    return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in known), 0)


def _parts(edges: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The system's messages at the beginning, and the conversation."""
    first = next((i for i, edge in enumerate(edges) if not edge.startswith(b"s")), len(edges))
    return edges[:first], edges[first:]


def _number(turn: str) -> int:
    """
    >>> _number("g1.0/1/12")
    12
    """
    return int(turn.rpartition("/")[2])


def _spoken(renderer: Renderer, turn: Served) -> list[int]:
    """What was sampled, without its end, which has no meaning within a text."""
    ids = turn.response_ids
    while ids and ids[-1] in renderer.stop_ids:
        ids = ids[:-1]
    return ids


def _branch(turn: Turn) -> Branch | None:
    return msgspec.convert(turn.branch, Branch | None)
