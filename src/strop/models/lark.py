"""Grammars in llguidance's Lark, put together rule by rule: texts, JSON, and free parts up to a mark.

    rules = Lark(MarkTokens.of(tokenizer, ends))
    thought = FreePart(rules, ["</think>"])
    rules.write(f"{thought.anything} {thought.until('</think>')} {rules.json({'type': 'integer'})}")

Added tokens of a tokenizer (`<think>`) are no text to llguidance: they have ids there. A model may also spell the same
mark in letters, and readers of its answer cannot tell the two apart; so a mark is either here.

A free part is any text, and any added token but those that end an answer. What a model could say and cannot in one:
bytes that are no text, and an added token in the middle of a mark that it spells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer

from strop.models.grammar import UNFORCED, check_grammar, make_json


class MarkTokens(Struct, frozen=True):
    """The added tokens of a tokenizer by their text. `closed` are the ids, first and last, of all other tokens and of
    those that end an answer."""

    ids: dict[str, int]
    texts: dict[int, str]
    closed: tuple[tuple[int, int], ...]

    @staticmethod
    def of(tokenizer: Tokenizer, ends: Iterable[int]) -> MarkTokens:
        added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        plain = {*tokenizer.get_vocab(with_added_tokens=False).values()} - added.keys()
        return MarkTokens(
            {text: id for id, text in added.items()}, added, join_ranges((id, id) for id in {*plain, *ends})
        )


def join_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """
    >>> join_ranges([(7, 7), (1, 2), (3, 3)])
    ((1, 3), (7, 7))
    """
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


class Lark:
    """The rules of one grammar. Equal rules are written once."""

    def __init__(self, tokens: MarkTokens) -> None:
        self.tokens = tokens
        self._names: dict[str, str] = {}
        self._lines: dict[str, str] = {}
        longest = sorted(tokens.ids, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest))) if longest else None

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """The name of a rule; a `lazy` one ends as early as it can."""
        return self._name("r", f"[lazy]: {body}" if lazy else f": {body}")

    def terminal(self, body: str) -> str:
        """The name of a regular expression, which knows no added tokens."""
        return self._name("T", f": {body}")

    def reserve(self) -> str:
        """The name of a rule that is given to `define` once its parts are known: it may be one of them."""
        name = f"r{len(self._lines)}"
        self._lines[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._lines[name] = f": {body}"

    @contextmanager
    def attempt(self) -> Generator[None]:
        """What is written within is forgotten if that raises."""
        names, lines = self._names.copy(), self._lines.copy()
        try:
            yield
        except BaseException:
            self._names, self._lines = names, lines
            raise

    def _name(self, kind: str, line: str) -> str:
        name = self._names.get(kind + line)
        if name is None:
            name = self._names[kind + line] = f"{kind}{len(self._lines)}"
            self._lines[name] = line
        return name

    def split(self, text: str) -> list[str | int]:
        """Text and the ids of the added tokens in it."""
        parts: list[str | int] = []
        at = 0
        for found in self._marks.finditer(text) if self._marks else ():
            parts += [text[at : found.start()]] if found.start() > at else []
            parts.append(self.tokens.ids[found[0]])
            at = found.end()
        return parts + ([text[at:]] if at < len(text) else [])

    def spell(self, text: str) -> str:
        """Exactly this text, its marks as tokens or in letters."""
        return " ".join(
            quote(part) if isinstance(part, str) else f"({_token(part)} | {quote(self.tokens.texts[part])})"
            for part in self.split(text)
        )

    def until(self, text: str, mark: str) -> str:
        """A terminal with the mark after it. In letters both are one piece, which ends as early as it can: in two the
        text would go on into the mark, and could not end there any more."""
        letters = self.rule(f"{text} {quote(mark)}", lazy=True)
        parts = self.split(mark)
        if all(isinstance(part, str) for part in parts):
            return letters
        ways = [_token(part) if isinstance(part, int) else quote(part) for part in parts]
        if isinstance(parts[-1], str):
            ways[-1] = self.rule(ways[-1], lazy=True)
        ways[0] = f"{text} {ways[0]}" if isinstance(parts[0], int) else self.terminal(f"{text} {ways[0]}")
        return self.rule(f"{letters} | {' '.join(ways)}")

    def json(self, schema: dict[str, Any], *, escapes: str | None = None) -> str:
        """The JSON texts of a schema. Raises `BadSchema`."""
        return self.rule(make_json(schema, escapes))

    def write(self, start: str) -> str:
        """The whole grammar. Raises `BadSchema`."""
        lines = [f"{name}{line}" for name, line in self._lines.items()]
        text = "\n".join([UNFORCED, f"start: {start}", *lines])
        check_grammar(text)
        return text


def quote(text: str) -> str:
    """
    >>> quote('a"b')
    '"a\\\\"b"'
    """
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """As a regular expression between slashes.

    >>> escape("</a>.")
    '<\\\\/a>\\\\.'
    """
    return re.sub(r"[\\/.^$*+?()\[\]{}|#&~-]", r"\\\g<0>", text).replace("\n", r"\n")


def _token(id: int) -> str:
    return f"<[{id}]>"


class FreePart:
    """Text and tokens in which only `marks` mean something. `without` is a pattern that may not come to be in it, but
    for what `until` leads to.

    `anything` is such a part up to its last piece of text, which is `text`; `until(mark)` is that piece with the mark
    after it.
    """

    def __init__(self, rules: Lark, marks: Sequence[str], without: str = "") -> None:
        self._rules = rules
        self._text = rules.terminal(r"/(?s:.)*/")
        if without:
            self._text = rules.terminal(f"{self._text} & ~({self._text} /{without}/ {self._text})")
        self.text = f"{self._text}?"
        begun = dict.fromkeys(escape(mark[:n]) for mark in marks for n in range(1, len(mark)))
        before = self._text
        if begun:  # readers do not see some tokens: none stands in a mark that is spelled
            before = rules.terminal(f"{self._text} & ~({self._text} /{'|'.join(begun)}/)")
        parts = [rules.split(mark) for mark in marks]
        known = {one[0] for one in parts if len(one) == 1 and isinstance(one[0], int)}
        firsts = {part for one in parts for part in one[:-1] if isinstance(part, int)} - known
        closed = join_ranges([*rules.tokens.closed, *((id, id) for id in known | firsts)])
        ranges = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in closed)
        # A token has to be written alike wherever it may come: of two ways that take it only one is followed.
        others = " | ".join([f"<[^{ranges}]>" if ranges else "<[*]>", *map(_token, sorted(firsts))])
        self.anything = rules.rule(f"({before}? ({others}))*")

    def until(self, mark: str) -> str:
        return self._rules.until(self._text, mark)
