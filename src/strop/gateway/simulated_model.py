"""A model that says what its chat template writes for an answer, and ends its turn in any way that a real one may.

model = SimulatedModel(renderer, messages, tools)
model.say(1, prompt_ids, "stop")      the ids of messages[1] as the template writes them, up to an end of turn
model.find_after(3, 1)                what the template writes after that answer once messages[:3] are there
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from msgspec import Struct

from strop.gateway.continuation import MARK, find_after
from strop.gateway.dialects.base import Json
from strop.gateway.jinja import BadTemplate
from strop.gateway.template import Renderer, Tools

Ending = Literal["stop", "length", "written"] | int
"""How an answer ends: as the template writes it; cut off before its end; with every mark that the template writes
after it, be it known for an end or not; or with this token."""


class SimulatedAnswer(Struct, frozen=True):
    """`words` is the answer up to its last word and `tail` what was said after that, `end` the last part of it; there
    is no tail where the template does not show the answer."""

    ids: list[int]
    words: str
    tail: str | None
    end: str


class SimulatedModel:
    """The assistant of one conversation."""

    def __init__(self, renderer: Renderer, messages: list[Json], tools: Tools) -> None:
        self._renderer, self._messages, self._tools = renderer, messages, tools

    @cached_property
    def known_ends(self) -> tuple[str, ...]:
        """What ends a turn at once, as text."""
        return (*map(self._renderer.decode, ([id] for id in self._renderer.stop_ids)), *self._renderer.stop_texts)

    def show(self, text: str) -> str:
        """A template's text as tokens show it: some tokenizers normalise what they are given."""
        renderer = self._renderer
        return renderer.decode(renderer.encode(text)) if renderer.tokenizer.normalizer else text

    def find_after(self, upto: int, at: int) -> str | None:
        """What the template writes after the last word of an answer, with these messages."""
        found = find_after(self._renderer, self._messages[:upto], self._tools, at, generate=True)
        return None if found is None else self.show(found)

    def unanswered(self, upto: int, at: int) -> str | None:
        """The template's text with an empty answer in the place of this one."""
        empty: Json = {"role": "assistant", "content": ""}
        chat = [*self._messages[:at], empty, *self._messages[at + 1 : upto]]
        try:
            return self.show(self._renderer.text(chat, self._tools, generate=True))
        except BadTemplate:
            return None

    def say(self, at: int, prompt_ids: list[int], ending: Ending) -> SimulatedAnswer:
        """The tokens of an answer to a prompt. One that the template does not show is taken to be ended at once."""
        renderer, chat = self._renderer, self._messages[: at + 1]
        alone = find_after(renderer, chat, self._tools, at, generate=False)
        if alone is None:
            return SimulatedAnswer([renderer.end_of_turn], "", None, "")
        words = self._words(at, len(alone))
        tail, end, rest = self._tail(at, alone)
        ids = renderer.encode_after(prompt_ids, words + tail + rest)
        ids = ids[: _length(renderer, ids, words + tail)]
        if ending == "length" and end:
            while len(ids) > 1 and renderer.find_end(ids)[0]:
                ids = ids[:-1]
        elif ending == "written" or isinstance(ending, int):
            held = _closed(tail[: len(tail) - len(end)], self._messages[at])
            ids = renderer.encode_after(prompt_ids, words + held)
            ids += [ending] if isinstance(ending, int) else self._marks(at, prompt_ids, words, held)
        return self._spoken(ids or [renderer.end_of_turn], words)

    def cut_off(self, at: int, prompt_ids: list[int]) -> list[SimulatedAnswer]:
        """The same answer cut off in every place between its words or the brackets of its last call and the end."""
        alone = find_after(self._renderer, self._messages[: at + 1], self._tools, at, generate=False)
        if alone is None:
            return []
        words = self._words(at, len(alone))
        tail, _, rest = self._tail(at, alone)
        ids = self._renderer.encode_after(prompt_ids, words + tail + rest)
        mark = MARK.search(tail) if self._messages[at].get("tool_calls") else None
        brackets = tail[: mark.start() if mark else 0].rstrip()
        if not mark and self._messages[at].get("tool_calls"):
            return []
        first, last = (_length(self._renderer, ids, words + text) for text in (brackets, tail))
        cuts = (self._spoken(ids[:n], words) for n in range(max(first, 1), last))
        return [cut for cut in cuts if cut.tail is not None and tail.startswith(cut.tail) and not cut.end]

    def _spoken(self, ids: list[int], words: str) -> SimulatedAnswer:
        text, (end, beyond) = self._renderer.decode(ids), self._renderer.find_end(ids) if ids else ("", "")
        tail = text[len(self.show(words)) :]
        return SimulatedAnswer(ids, words, tail, (end + beyond) if tail.endswith(end + beyond) else "")

    def _words(self, at: int, num_behind: int) -> str:
        """The answer as it stands at the end of the template's text, up to its last word."""
        text = self._renderer.text(self._messages[: at + 1], self._tools, generate=False)
        prompt = self._renderer.text(self._messages[:at], self._tools, generate=True)
        last = len(text) - num_behind
        if text.startswith(prompt) and len(prompt) <= last:
            return text[len(prompt) : last]
        # History is written otherwise now: the answer begins where another one would differ.
        other: Json = {"role": "assistant", "content": "\u2297"}
        otherwise = self._renderer.text([*self._messages[:at], other], self._tools, generate=False)
        same = next((i for i, (a, b) in enumerate(zip(text, otherwise, strict=False)) if a != b), len(otherwise))
        return text[min(same, last) : last]

    def _tail(self, at: int, alone: str) -> tuple[str, str, str]:
        """What a model says after its last word: up to the first end of turn that the template writes there, when the
        answer is the last message or when another follows; and that end; and what comes after it."""
        if found := self._first_end(alone):
            stop, end = found
            return alone[:stop], end, alone[stop:]
        later = self._later(at)
        found = self._first_end(later) if later else None
        if later and found and later[: found[0] - len(found[1])].split() == alone.split():
            return later[: found[0]], found[1], later[found[0] :]
        closed = _closed(alone, self._messages[at])
        return closed, "", alone[len(closed) :]

    def _is_answer(self, at: int) -> bool:
        return self._messages[at]["role"] == "assistant"

    def _first_end(self, text: str) -> tuple[int, str] | None:
        """Where the first end of turn stops in a text, and which it is."""
        found = [(at, -len(end), end) for end in self.known_ends if end and (at := text.find(end)) >= 0]
        return (min(found)[0] - min(found)[1], min(found)[2]) if found else None

    def _marks(self, at: int, prompt_ids: list[int], words: str, held: str) -> list[int]:
        """The tokens that the template goes on with, as long as they are marks that no agent sees; ended at last."""
        renderer, later = self._renderer, self._later(at) or ""
        found: list[int] = []
        if later.startswith(held):
            ids = renderer.encode_after(prompt_ids, words + later)
            for id in ids[_length(renderer, ids, words + held) :]:
                if renderer.decode_answer([id]).strip() or (found[-1:] and found[-1] in renderer.stop_ids):
                    break
                found.append(id)
        return found if found and found[-1] in renderer.stop_ids else [*found, renderer.stop_ids[-1]]

    def _later(self, at: int) -> str | None:
        """What the template writes after an answer once messages follow it."""
        upto = next((i for i in range(at + 1, len(self._messages)) if self._is_answer(i)), len(self._messages))
        if upto == at + 1:
            return None
        return find_after(self._renderer, self._messages[:upto], self._tools, at, generate=True)

    def closing(self, at: int) -> str:
        """What the template writes after the last word of an answer when it is the last message, up to its end."""
        alone = find_after(self._renderer, self._messages[: at + 1], self._tools, at, generate=False)
        tail, end, _ = self._tail(at, alone or "")
        return self.show(tail[: len(tail) - len(end)])

    def ends(self, at: int) -> bool:
        """Whether the template writes an end of turn after an answer."""
        alone = find_after(self._renderer, self._messages[: at + 1], self._tools, at, generate=False) or ""
        return bool(self._first_end(alone)) or self._renderer.writes_end(self._messages[at])


def _closed(text: str, answer: Json) -> str:
    """What a template writes after an answer's last word, without white space that is not the answer's."""
    content = "" if answer.get("tool_calls") else answer["content"] or ""
    space = content[len(content.rstrip()) :]
    return max(text.rstrip(), space if text.startswith(space) else "", key=len)


def _length(renderer: Renderer, ids: list[int], text: str) -> int:
    """How many of the ids a text takes, with whole characters."""
    for n in range(len(ids)):
        said = renderer.decode(ids[:n])
        if len(said) >= len(text) and not said.endswith("\ufffd"):
            return n
    return len(ids)
