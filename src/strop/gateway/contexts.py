"""Exact prompts: what the model said is given back to it as the tokens it said it in.

A session remembers every context it has served, per agent. A context is a conversation up to
and including an answer; its ids are the turn's prompt and response. A request that extends one gets those ids and the
tokens of the new messages:

    served      <|im_start|>user\\n3 * 4?<|im_end|>\\n<|im_start|>assistant\\n   +   12 . <|im_end|>
    request     user "3 * 4?", assistant "12.", user "And 5 * 6?"
    prompt      [the same ids ............................................]   +   \\n<|im_start|>user\\nAnd 5 * 6? ...

Otherwise the conversation is rendered whole, and the prompt says why it could not be extended. Contexts form a trie
whose edges are messages, as `Conversation` has them. Turns may have said the same words after different thoughts: those
of them that the request says otherwise about (see known_turns.py) are not gone on from.

That is `history = "sampled"`. With `history = "template"` the model sees what a stock server would show it when it is
deployed: where the template writes what was said otherwise (thinking that is stripped, say), a branch begins that
shares the longest exact prefix.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from hashlib import blake2b
from typing import Literal, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.gateway.branch import Branch, explain_difference
from strop.gateway.conversation import Conversation, make_edge, step
from strop.gateway.dialects.base import Json
from strop.gateway.known_turns import KnownAnswer, KnownTurn, find_answers, find_made_ids, measure_agreement
from strop.gateway.template import Messages, Renderer, Tools
from strop.types import Turn

History = Literal["sampled", "template"]
RECENT = 8
"""How many of the last conversations of an agent are kept as they came: the next one most likely goes on from one."""


class Prompt(Struct, frozen=True, kw_only=True):
    """The ids an engine is given, and how they came about (see `Turn` for `parent`, `shared` and `branch`)."""

    ids: list[int]
    parent: str | None = None
    shared: int = 0
    branch: Branch | None = None
    hashed: blake2b | None = None


class Contexts:
    """Every context served to one agent of a session by one policy. In which order turns are added does not matter:
    requests overlap, and end in another order than they began."""

    def __init__(self, start: bytes, made: dict[str, str] | None = None) -> None:
        """`made` has the turns by the call ids that the gateway made for them, those of other contexts too."""
        self._start = blake2b(start, digest_size=8)
        self._made: dict[str, str] = {} if made is None else made
        self._served: dict[
            bytes, list[KnownTurn]
        ] = {}  # a context's key -> the turns that ended it, the likeliest last
        self._gone_on: dict[str, set[bytes]] = {}  # a turn -> the hashes of messages that followed it
        self._prompts: dict[bytes, Prompt] = {}  # a request's key -> the prompt it got, for when it comes again
        self._turns: list[KnownTurn] = []  # by number
        self._by_id: dict[str, KnownTurn] = {}
        self._recent: deque[Conversation] = deque(maxlen=RECENT)  # the latest first

    def read(
        self, messages: Messages, tools: Tools, *, variables: Json, lead: str = "", prefill: str = ""
    ) -> Conversation:
        """A request's conversation. What it begins with, if it was asked lately, is known already."""
        return Conversation.of(messages, tools, variables=variables, lead=lead, prefill=prefill, earlier=self._recent)

    def prompt(
        self, renderer: Renderer, conversation: Conversation, history: History = "sampled", *, remember: bool = True
    ) -> Prompt:
        """The prompt for a request: recorded ids as far as they go. The same request gets the same one again, unless
        it was only asked about. Raises `BadTemplate`."""
        if (again := self._prompts.get(conversation.key)) is not None:
            return again
        if (begun := self._prompts.get(conversation.context)) is not None:  # asked before, without this lead
            prompt = begun
        elif conversation.messages[0]["role"] == "prompt":
            prompt = self._raw(renderer, conversation.messages[0]["content"])
        elif history == "template":
            prompt = self._render(renderer, conversation)
        else:
            prompt = self._extend(renderer, conversation) or self._render_whole(renderer, conversation)
        if conversation.lead:
            prompt = replace(prompt, ids=prompt.ids + renderer.encode_after(prompt.ids, conversation.lead))
        prompt = replace(prompt, hashed=self._hash(prompt))
        if remember:
            self._prompts[conversation.key] = prompt
            self._recent.appendleft(conversation)
        return prompt

    def prompt_hash(self, turn: str) -> blake2b:
        """The hash of a turn's prompt."""
        return self._by_id[turn].hashed

    def _hash(self, prompt: Prompt) -> blake2b:
        """The hash of a prompt goes on from its parent's: a long conversation costs what its new tokens cost."""
        parent = self._by_id.get(prompt.parent or "")
        if parent is None or not parent.prompt_ids or prompt.shared < len(parent.prompt_ids):
            hashed, new = self._start.copy(), msgspec.json.encode(prompt.ids)[1:-1]
        else:
            hashed, new = parent.hashed.copy(), msgspec.json.encode(prompt.ids[len(parent.prompt_ids) :])[1:-1]
            new = new and b"," + new
        hashed.update(new)
        return hashed

    def add(self, turn: Turn, conversation: Conversation) -> None:
        """Remember a recorded turn. What was not delivered whole cannot be extended, but its ids can be shared."""
        raw = conversation.messages[0]["role"] == "prompt"
        prompt = conversation.messages[0]["content"] if raw else None
        answer, said = make_edge(turn.answer, conversation.tools), turn.answer["content"]
        seen = self._prompts.get(conversation.key)
        if seen is None:
            seen = Prompt(ids=turn.prompt_ids, parent=turn.parent, shared=turn.shared, branch=_branch(turn))
            seen = self._prompts[conversation.key] = replace(seen, hashed=self._hash(seen))
        number = turn_number(turn.id)
        edges, parent = [*conversation.edges, answer], self._by_id.get(turn.parent or "")
        before = parent if parent and self._goes_on(parent, turn, conversation, edges) else None
        self._made |= dict.fromkeys(find_made_ids(turn), turn.id)
        served = KnownTurn(
            id=turn.id,
            number=number,
            request=number - turn.choice,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            hashed=cast(blake2b, seen.hashed),
            edges=edges,
            variables=conversation.variables,
            before=before.id if before else None,
            heard=find_answers(conversation.messages, len(before.edges) if before else 0)
            | {len(edges) - 1: KnownAnswer.by(turn)},
            text=prompt + said if isinstance(prompt, str) and said and not turn.abandoned else None,
            said=len(prompt or ""),
        )
        if not self._turns or self._turns[-1].number < number:
            self._turns.append(served)
        else:
            insort(self._turns, served, key=lambda turn: turn.number)
        if before:
            self._gone_on.setdefault(before.id, set()).update(edges[len(before.edges) : -1][:1])
        self._by_id[turn.id] = served
        if not turn.abandoned and not raw:
            alike = self._served.setdefault(step(conversation.keys[-1], answer), [])
            insort(alike, served, key=lambda turn: (turn.request, -turn.number))

    def _goes_on(self, parent: KnownTurn, turn: Turn, conversation: Conversation, edges: list[bytes]) -> bool:
        """Whether a turn's context is its parent's, and more."""
        if edges[: len(parent.edges)] != parent.edges or turn.shared < len(parent.prompt_ids) + len(
            parent.response_ids
        ):
            return False
        return turn.branch is None or self._agreement(parent, conversation) is not None

    def _agreement(self, turn: KnownTurn, conversation: Conversation) -> int | None:
        return measure_agreement(turn, self._by_id, conversation, self._made)

    def _find(self, conversation: Conversation) -> tuple[KnownTurn, int] | None:
        """The turn that ended the longest conversation which this one begins with, and how many messages that has.

        Where nothing the request says of them tells several apart, an agent most likely goes on from the latest; among
        the choices of one request, from the first."""
        for n in range(len(conversation.keys), 0, -1):
            best, most = None, -1
            for turn in reversed(self._served.get(conversation.keys[n - 1], ())):
                if (agreed := self._agreement(turn, conversation)) is not None and agreed > most:
                    best, most = turn, agreed
                    if most == conversation.num_told[n - 1]:
                        break  # there may be thousands
            if best is not None:
                return best, n
        return None

    def _extend(self, renderer: Renderer, conversation: Conversation) -> Prompt | None:
        """What the model said stays as it said it, whatever the template makes of it now."""
        found = self._find(conversation)
        if found is None:
            return None
        turn, served = found
        path = turn.ids
        new = renderer.continuation(conversation.messages, conversation.tools, served, path, len(turn.response_ids))
        if new is None:
            return None
        shared = len(path)
        path += new  # a list of its own: what is long is copied once
        return Prompt(ids=path, parent=turn.id, shared=shared, branch=self._fork(turn, conversation, served))

    def _fork(self, turn: KnownTurn, conversation: Conversation, served: int) -> Branch | None:
        """Why this is not simply the conversation going on: another request went on from here with other words, or
        the agent puts words into the model's mouth."""
        new = conversation.edges[served:]
        if not new:
            return None
        gone_on = self._gone_on.get(turn.id)
        same = not gone_on or new[0] in gone_on
        said = any(message["role"] == "assistant" for message in conversation.messages[served:])
        return None if same and not said else self._why(conversation)

    def _render(self, renderer: Renderer, conversation: Conversation) -> Prompt:
        """What a stock server would show the model: recorded ids as long as the template writes their very text."""
        text = renderer.text(conversation.messages, conversation.tools, generate=True)
        if (found := self._find(conversation)) is not None:
            turn, served = found
            shown, said = text, renderer.decode(turn.ids)
            if not shown.startswith(said):
                shown = renderer.decode(renderer.encode(text))  # some tokenizers normalise what they are given
            if shown.startswith(said):
                ids = turn.ids + renderer.encode_after(turn.ids, shown[len(said) :])
                return Prompt(
                    ids=ids, parent=turn.id, shared=len(turn.ids), branch=self._fork(turn, conversation, served)
                )
        return self._branch(renderer.encode(text), self._reason(conversation))

    def _render_whole(self, renderer: Renderer, conversation: Conversation) -> Prompt:
        return self._branch(renderer.prompt(conversation.messages, conversation.tools), self._reason(conversation))

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
        """A raw prompt extends the one whose text or ids, with its answer, it begins with."""
        if not isinstance(prompt, str):
            paths = ((turn, turn.prompt_ids + _without_end(renderer, turn)) for turn in self._turns)
            begun = [(len(path), turn) for turn, path in paths if prompt[: len(path)] == path]
            if begun:
                _, turn = max(begun, key=lambda found: (found[0], found[1].request, -found[1].number))
                return Prompt(ids=prompt, parent=turn.id, shared=common_prefix(turn.ids, prompt))
            return self._branch(prompt, "new_conversation" if self._turns else None)
        texts = [turn for turn in self._turns if turn.text and prompt.startswith(turn.text)]
        if texts:
            turn = max(texts, key=lambda turn: (len(turn.text or ""), turn.request, -turn.number))
            said, text = _without_end(renderer, turn), prompt[turn.said :]
            while not text.startswith(renderer.decode_answer(said)):  # a stop string, which the agent was not shown
                said = said[:-1]
            path, rest = turn.prompt_ids + said, text[len(renderer.decode_answer(said)) :]
            return Prompt(ids=path + renderer.encode_after(path, rest), parent=turn.id, shared=len(path))
        return self._branch(renderer.encode(prompt), "new_conversation" if self._turns else None)

    def _reason(self, conversation: Conversation) -> Branch | None:
        if not self._turns:
            return None
        if self._find(conversation):
            return "template_rewrote"
        if not any(key in self._served for key in conversation.keys):  # those that were have been said otherwise
            answered = (turn for turns in self._served.values() for turn in turns)
            same = [turn for turn in answered if conversation.edges[: len(turn.edges)] == turn.edges]
            # Or the same words, and they were not an answer's.
            same = same or [turn for turn in self._turns if conversation.edges == turn.edges[:-1]]
            if same:
                return (
                    "changed_tools"
                    if any(turn.variables == conversation.variables for turn in same)
                    else "changed_kwargs"
                )
        return self._why(conversation)

    def _why(self, conversation: Conversation) -> Branch:
        """How a conversation differs from the one served before that is most like it."""
        now = set(conversation.edges)
        return explain_difference(
            max(self._turns, key=lambda turn: len(now.intersection(turn.edges))).edges, conversation.edges
        )


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


def turn_number(turn: str) -> int:
    """
    >>> turn_number("g1.0/1/12")
    12
    """
    return int(turn.rpartition("/")[2])


def _without_end(renderer: Renderer, turn: KnownTurn) -> list[int]:
    """What was sampled, without its end, which has no meaning within a text."""
    ids = turn.response_ids
    while ids and ids[-1] in renderer.stop_ids:
        ids = ids[:-1]
    return ids


def _branch(turn: Turn) -> Branch | None:
    return msgspec.convert(turn.branch, Branch | None)
