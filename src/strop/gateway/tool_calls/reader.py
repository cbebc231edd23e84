"""Text in, pieces out: the one parser that all formats share.

Text is in one of three places: in the answer's words, in a thought, or in calls. A grammar says which marks lead from
one to the other; its syntax (syntax.py) reads calls. Whatever is not understood yet is held, and everything that is
given out is cut from the front of what is held, so nothing can be lost or said twice.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Literal, Protocol

from msgspec import Struct

from strop.gateway.tool_calls.base import ParsedCall, Piece, Thought, Tools
from strop.gateway.tool_calls.form import CallForm
from strop.gateway.tool_calls.values import Scan


class CallFound(Struct, frozen=True):
    """A call that ends at `end`. More may follow in the same section, whose kind is handed to the next step. One that
    is not `whole` ends with the answer, and nothing in it says that no more was to come."""

    end: int
    call: ParsedCall
    section: str
    whole: bool = True


class SectionEnd(Struct, frozen=True):
    """No further call here: the section's frame ends at `end`."""

    end: int


class MalformedCall(Struct, frozen=True):
    """Text up to `end` is not a call. It counts as malformed if it set out to be one."""

    end: int
    malformed: bool = True


Step = CallFound | SectionEnd | MalformedCall | None
"""What a look at the text has shown; None if that depends on text to come."""


class Syntax(Protocol):
    """How calls are written. `opens` are the marks where they begin, `marks` all it has."""

    @property
    def opens(self) -> tuple[str, ...]: ...

    @property
    def marks(self) -> tuple[str, ...]: ...

    def step(self, text: str, *, section: str, scan: Scan, final: bool, tools: Tools) -> Step:
        """Look at text that begins with one of `opens` or, within a `section`, after a call. `scan` is kept from look
        to look until something is found; `final` says that no more text will come."""
        ...


class Grammar(Struct, frozen=True, kw_only=True):
    """One family's way of writing.

    `known_by` are texts that a template of this family has, all of them. `thoughts` are pairs of marks around
    reasoning, `frames` marks that tell an agent nothing (`{tool}` in one stands for the name of each tool). `form` is
    how calls are written, where that is known; `words` what stands around an answer's words, and `after_thought` what
    stands between a thought and either. `inner` are special tokens within calls, besides the syntax's own.

    >>> from strop.gateway.tool_calls.families import HERMES
    >>> parser = HERMES.parser([], calls=True, lead="")
    >>> parser.feed('Let me see.\\n<tool_call>{"name": "now", "argu') + parser.feed('ments": {}}</tool_call>')
    ['Let me see.', ParsedCall(name='now', arguments={})]
    """

    name: str
    known_by: tuple[str, ...] = ()
    syntax: Syntax | None = None
    thoughts: tuple[tuple[str, str], ...] = ()
    frames: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    form: CallForm | None = None
    words: tuple[str, str] = ("", "")
    after_thought: str = ""

    @property
    def head(self) -> tuple[str, str] | None:
        """How a call begins, before its tool's name and after it."""
        return self.form and self.form.head

    @property
    def marks(self) -> frozenset[str]:
        """The special tokens with a meaning in an answer: the parser sees them."""
        calls = self.syntax.marks if self.syntax else ()
        written = {*calls, *self.frames, *self.inner, *(mark for pair in self.thoughts for mark in pair)}
        return frozenset(written | {token for mark in written for token in _TOKEN.findall(mark)})

    def parser(self, tools: Tools, *, calls: bool, lead: str, whole: bool = False) -> Reader:
        """`calls`: whether calls are taken out. `lead` is what the assistant's turn begins with before the model says
        anything: a generation prompt may open its reasoning, an agent may demand a call or begin the answer itself.
        The parser reads it first; none of it is given out, except that a call begun in it is a call. `whole`: once
        words begin they are the rest of the answer, whatever marks stand in them, as in JSON that a schema demands."""
        return Reader(self, tools, calls=calls, lead=lead, whole=whole)

    def begin_call(self, tool: str | None) -> str | None:
        """The beginning of an answer that calls a tool, this one if it is named: given to the model where an agent
        demands a call. None if the family has no such beginning."""
        if self.head is None:
            return None
        before, after = self.head
        # Models write a space, or the quote before a name, as one token with what follows: that is theirs to begin.
        if tool is not None:
            return (before + tool + after).rstrip(" ")
        return before[: before.rfind("{")] if before.rfind("{") > 0 else before or None

    def written(self, name: str, arguments: dict[str, Any]) -> str | None:
        """A call as the family writes it, for templates that leave calls out; None if that is not known."""
        if self.head is None:
            return None
        table = json.dumps(arguments, ensure_ascii=False)
        keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        close = getattr(self.syntax, "close", "") or "".join(getattr(self.syntax, "closes", ())[:1])
        for body in (f"{table}}}]", f"{table}}}", f"{keywords})]", table):
            text = self.head[0] + name + self.head[1] + body + close
            parser = self.parser((), calls=True, lead="")
            if parser.feed(text) + parser.close() == [ParsedCall(name, arguments)]:
                return text
        return None

    def find_open_thought(self, lead: str) -> str:
        """The mark that ends the thought which a lead leaves open; empty if it leaves none."""
        return next((close for open, close in self.thoughts if lead.rfind(open) > lead.rfind(close)), "")


_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class Reader:
    """One answer on its way from text to pieces. `calls` and `malformed` count what was found so far.

    White space around marks belongs to the format and is dropped: before a mark, and after it as long as nothing was
    said. A call that is not well-formed is given out as it was written, white space and all.
    """

    def __init__(self, grammar: Grammar, tools: Tools, *, calls: bool, lead: str, whole: bool = False) -> None:
        self.calls = self.malformed = 0
        self._whole, self._after = whole, grammar.words[1] if whole else ""
        self._tools = tools
        self._syntax = grammar.syntax if calls else None
        self._opens = self._syntax.opens if self._syntax else ()
        names: tuple[str, ...] = ()
        if grammar.frames and "{tool}" in "".join(grammar.frames):
            names = tuple([tool.get("function", {}).get("name", "") for tool in tools])
        self._thoughts, self._closes, self._words = _find_marks(grammar.thoughts, grammar.frames, names, self._opens)
        self._held = ""
        self._at = 0  # where the held text begins in the whole
        self._unsaid = len(lead)  # text before this place is the lead's, and never given out
        self._cut = False  # the answer is over: it reached its limit of tokens
        self._place: Literal["words", "thought", "calls"] = "words"
        self._close = _marks()  # what ends the thought
        self._space = 0  # how much of what is held is white space before an open call
        self._scan = Scan()
        self._section = ""
        self._fresh_thought = False  # a thought has begun and nothing was thought so far
        self._said = False
        self._leading = False  # after a mark with no words so far: white space leads nowhere
        self._marked = self._after_mark = False  # some mark was there; nothing was said since the last one
        if lead:
            self.feed(lead)
            self.calls = self.malformed = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        return self._read(final=False)

    def close(self, *, cut: bool = False) -> list[Piece]:
        """The answer is over: what was held back is text after all, except white space after calls or a mark. `cut`: it
        reached its limit of tokens."""
        self._cut = cut
        pieces = self._read(final=True)
        if self._place == "thought":
            self._think(len(self._held), pieces)
        elif not ((self.calls or self._after_mark) and self._held.isspace()):
            self._say(len(self._held), pieces)
        return pieces

    def _read(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        more = True
        while more and self._held:
            if self._place == "words":
                more = self._read_words(final, pieces)
            elif self._place == "calls":
                more = self._read_calls(final, pieces)
            else:
                more = self._read_thought(final, pieces)
        return pieces

    # -- the three places: each takes one step, and says whether there may be another ------------------------------

    def _read_words(self, final: bool, pieces: list[Piece]) -> bool:
        if self._leading:
            self._drop(len(self._held) - len(self._held.lstrip()))
        if self._whole and self._said:
            return self._read_whole(final, pieces)
        at, mark = self._words.find(self._held, final)
        if self._whole and self._held[:at].strip() and not self._in_lead(at - 1):
            self._say(at - len(self._held[:at].lstrip()) + 1, pieces)
            return True
        words = len(self._held[:at].rstrip())
        first = not self._marked and not self._said and (not words or self._in_lead(words - 1))
        if mark in self._closes and not first and not self._in_lead(at):
            words, mark = at + len(mark), ""  # the end of a thought that never began
        elif mark is None and final:
            return False
        if words:
            self._say(words, pieces)
        if not mark:
            return mark is not None
        space = at - words
        if mark in self._opens:
            self._place, self._section = "calls", ""
            self._space, self._scan = space, Scan()
            return True
        self._drop(space + len(mark))
        if mark in self._thoughts:
            self._place, self._fresh_thought = "thought", True
            calls = [open for open in self._opens if len(open) > 1] if self._in_lead(-1) else []
            self._close = _marks(self._thoughts[mark], *calls)
        self._note_mark()
        return True

    def _read_whole(self, final: bool, pieces: list[Piece]) -> bool:
        """Words to the end of the answer, but for the mark that ends them."""
        if not final:
            held = next((n for n in range(len(self._after), 0, -1) if self._held.endswith(self._after[:n])), 0)
            self._say(len(self._held) - held, pieces)
        elif self._after and self._held.startswith(self._after):
            self._drop(len(self._after))
        return False

    def _read_thought(self, final: bool, pieces: list[Piece]) -> bool:
        if self._fresh_thought:
            self._drop(len(self._held) - len(self._held.lstrip()))
        at, mark = self._close.find(self._held, final)
        if mark is None and final:
            return False
        thought = len(self._held[:at].rstrip())
        if thought:
            self._think(thought, pieces)
        if mark is None:
            return False
        if mark in self._opens and not self._in_lead(at - thought):
            self._think(at - thought + len(mark), pieces)  # only a lead may begin a call in a thought
            return True
        self._drop(at - thought + (0 if mark in self._opens else len(mark)))
        self._place = "words"
        self._note_mark()
        return True

    def _read_calls(self, final: bool, pieces: list[Piece]) -> bool:
        assert self._syntax is not None
        text = self._held[self._space :]
        step = self._syntax.step(text, section=self._section, scan=self._scan, final=final, tools=self._tools)
        self._scan.seen = len(text)
        if self._cut and isinstance(step, CallFound) and not step.whole:
            step = MalformedCall(step.end)
        match step:
            case None:
                assert not final, "at the end of an answer nothing is undecided"
                return False
            case CallFound(end, call, section):
                self._drop(self._space + end)
                self.calls += 1
                pieces.append(call)
                self._section = section
                self._space, self._scan = 0, Scan()
                self._note_mark()
                if not section:
                    self._place = "words"
            case SectionEnd(end):
                self._drop(end)
                self._place = "words"
            case MalformedCall(end, malformed):
                self.malformed += malformed
                self._say(self._space + end, pieces)
                self._space, self._scan = 0, Scan()
                if not self._section:
                    self._place = "words"
        return True

    # -- giving out ------------------------------------------------------------------------------------------------

    def _in_lead(self, at: int) -> bool:
        return self._at + at < self._unsaid

    def _note_mark(self) -> None:
        self._leading, self._marked, self._after_mark = not self._said, True, True

    def _drop(self, length: int) -> str:
        """Cut from the front of what is held; what of it is not the lead's."""
        taken, self._held = self._held[:length], self._held[length:]
        new = taken[max(0, self._unsaid - self._at) :]
        self._at += length
        return new

    def _say(self, length: int, pieces: list[Piece]) -> None:
        self._leading = self._after_mark = False
        if words := self._drop(length):
            self._said = True
            pieces.append(words)

    def _think(self, length: int, pieces: list[Piece]) -> None:
        self._fresh_thought = False
        if (thought := self._drop(length)) and not thought.isspace():
            pieces.append(Thought(thought))


class _Marks:
    """Finds the first of some marks, the longest where several begin."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        ordered = sorted(set(marks), key=lambda mark: (-len(mark), mark))
        self._any = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._begun = frozenset(mark[:n] for mark in ordered for n in range(1, len(mark)))
        self._last = frozenset(begun[-1] for begun in self._begun)
        self._longest = len(ordered[0]) - 1 if ordered else 0

    def find(self, text: str, final: bool) -> tuple[int, str | None]:
        """Where the first mark begins, and which; or None, and from where on the text may be the beginning of one."""
        found = self._any.search(text) if self._any else None
        at = found.start() if found else len(text)
        if not final and text[-1:] in self._last:
            longest = min(self._longest, len(text))
            begun = next((len(text) - n for n in range(longest, 0, -1) if text[-n:] in self._begun), len(text))
            if begun <= at:
                return begun, None
        return at, found[0] if found else None


@lru_cache(maxsize=256)
def _find_marks(
    thoughts: tuple[tuple[str, str], ...], frames: tuple[str, ...], names: tuple[str, ...], opens: tuple[str, ...]
) -> tuple[dict[str, str], frozenset[str], _Marks]:
    """The marks around thoughts, those of them that end one, and all that words may lead to. `names` are the tools'."""
    written = {frame.replace("{tool}", name) for frame in frames for name in (names or ("",))}
    pairs = dict(thoughts)
    closes = frozenset(pairs.values()) - written
    return pairs, closes, _marks(*sorted({*pairs, *closes, *written, *opens}))


@lru_cache(maxsize=256)
def _marks(*marks: str) -> _Marks:
    return _Marks(marks)
