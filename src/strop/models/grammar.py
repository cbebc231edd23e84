"""Grammars that answers must follow, as the tokens of a model see them.

    gateway   schemas and calls ──▶ text (lark.py) ──▶ Sampling.grammar, kept on the turn
    engine    TokenMatcher: which tokens may come next ──▶ draw one of them ──▶ take ──▶ ...
    learner   the same over what was drawn: the same masks, and so the same distribution (learner/masks.py)

Compiling and masks are llguidance's. A mask is bits, one for each token of the vocabulary, 32 to a word
(bits.py).

An answer ends with one of its `ends` tokens, which may come only where the grammar is complete, and must come where
nothing else may: `close_grammar` puts them into the text itself, so that nothing depends on what a tokenizer, or a
server, takes for the end of a text. An answer that is cut off by its length is cut off in the middle of the grammar.
"""

from __future__ import annotations

import json
import math
import re
import threading
from copy import copy
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import llguidance
import numpy as np
from llguidance import JsonCompiler, LLMatcher, LLTokenizer

from strop.errors import ConfigError, StropError
from strop.types import AnswerGrammar

LONGEST = 100_000
"""Characters of a schema."""
LARGEST_DIVISOR = 10_000
"""Of `multipleOf`, without the zeros at its end: what is compiled of it grows with that number."""
SPACE = r"[ \n\t]{0,16}"
"""After a comma or a colon of a JSON text, and nowhere else: what the library calls flexible has no limit, and a model
that has not learned yet would draw spaces to the end."""
UNFORCED = '%llguidance {"no_forcing": true}'
"""Where a text can only go on in one way, all tokens that spell it may come, not only those of its usual spelling."""
VERSION = llguidance.get_version()
_READING = threading.Lock()
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


class BadSchema(ConfigError):
    """A schema that cannot be compiled, with the reason."""


class OutOfGrammar(StropError):
    """A token that came where the grammar does not allow it."""


class GrammarLimit(OutOfGrammar):
    """A grammar that has grown too large to be followed any further."""


def make_json(schema: dict[str, Any], escapes: str | None = None) -> str:
    """The part of a grammar that is JSON texts of a schema; in strings only these `escapes`. Raises `BadSchema`."""
    written = json.dumps({name: value for name, value in schema.items() if name != "$id"})  # some give no URI there
    if len(written) > LONGEST:
        raise BadSchema(f"it has {len(written):,} characters, more than {LONGEST:,}")
    refuse_divisors(schema)
    return _make_json(written, escapes)


def refuse_divisors(schema: object) -> None:
    """Raises `BadSchema` for a `multipleOf` whose digits make a large number: so many states has what is compiled.

    >>> refuse_divisors({"multipleOf": 1_000_000}), refuse_divisors({"multipleOf": 0.025})
    (None, None)
    """
    if isinstance(schema, list):
        for part in cast("list[object]", schema):
            refuse_divisors(part)
    if not isinstance(schema, dict):
        return
    for name, part in cast("dict[str, object]", schema).items():
        if name == "multipleOf" and isinstance(part, int | float) and part == part and abs(part) != math.inf:
            digits = "".join(map(str, Decimal(str(part)).normalize().as_tuple().digits))
            if int(digits) > LARGEST_DIVISOR:
                raise BadSchema(f"multipleOf {part} has the digits {digits}, which are more than {LARGEST_DIVISOR:,}")
        elif name not in ("enum", "const", "default", "examples"):
            refuse_divisors(part)


@lru_cache(256)
def _make_json(schema: str, escapes: str | None) -> str:
    try:
        compiled = json.loads(JsonCompiler(separators=(f",{SPACE}", f":{SPACE}")).compile(schema))
    except ValueError as error:
        raise BadSchema(str(error).partition("\n")[0]) from None
    found = compiled["grammars"][0]["json_schema"]
    if escapes is not None:
        found["x-guidance"]["json_allowed_escapes"] = escapes
    return f"%json {json.dumps(found)}"


@lru_cache(256)
def check_grammar(text: str) -> None:
    """Raises `BadSchema` for a text that is no grammar."""
    _rename_root(text)
    if said := LLMatcher.validate_grammar(text):
        raise BadSchema(said.partition("\n")[0])


def close_grammar(grammar: AnswerGrammar) -> str:
    """The grammar of an answer with the token that ends it. All who hold an answer to it, or make its masks again, read
    this very text. Its root is the one rule whose name is `start`, at the beginning of a line; `BadSchema` is
    raised where there are others.

    >>> print(close_grammar(AnswerGrammar(text='start: "yes"', ends=(1, 2), version="")))
    answer_without_end: "yes"
    start: answer_without_end ( <[1]> | <[2]> )
    """
    ends = " | ".join(f"<[{id}]>" for id in grammar.ends)
    return f"{_rename_root(grammar.text)}\nstart: answer_without_end ( {ends} )"


def _rename_root(text: str) -> str:
    body, found = re.subn(r"(?m)^start\s*:", "answer_without_end:", text)
    if found != 1:
        raise BadSchema(f"it makes a grammar that has {found} rules that are called start")
    return body


class TokenMatcher:
    """An answer on its way through its grammar.

    Copies share what the library has found of the grammar's words, which has a limit: one that comes to it goes on
    alone, from a beginning of its own. So what others have answered never decides whether an answer can be followed,
    and it can be by everybody or by nobody."""

    def __init__(self, model: Path, vocabulary: int, grammar: AnswerGrammar) -> None:
        """`vocabulary` is how many logits the model in this folder makes. Raises `BadSchema`."""
        self._tokenizer, self._text = _read_tokenizer(model, vocabulary), close_grammar(grammar)
        self._num_words = -(-vocabulary // 32)
        self._matcher = self._begin()
        if self._matcher.is_error():
            raise BadSchema(self._find_error())
        self._taken: list[int] = []
        self._alone = False
        self._limit = threading.Event()  # of all copies

    @property
    def spent(self) -> bool:
        """Whether new copies of it would come to the limit at once."""
        return self._limit.is_set()

    def copy(self) -> TokenMatcher:
        """One at the same place, which goes its own way."""
        other = copy(self)
        other._matcher, other._taken = self._matcher.deep_copy(), [*self._taken]
        return other

    def find_allowed(self) -> Words:
        """The mask of what may come next. Raises `GrammarLimit` where that takes too much to find."""
        mask = self._find_mask()
        if self._matcher.is_error() and not self._alone:
            self._go_alone()
            mask = self._find_mask()
        if self._matcher.is_error():
            raise GrammarLimit(f"the grammar cannot be followed: {self._find_error()}")
        return mask

    def take(self, token: int) -> None:
        """It came next. Raises `OutOfGrammar`, also as `GrammarLimit`."""
        # Not `validate_tokens`: it knows the tokenizer's own end of a text as nothing else than that.
        if self._matcher.is_error() or not self._matcher.consume_token(token):
            self._take_alone(token)
        self._taken.append(token)

    def _take_alone(self, token: int) -> None:
        """It was refused: because of the limit, or because it is forbidden."""
        if not self._alone:
            self._go_alone()
            self.find_allowed()
            if self._matcher.consume_token(token):
                return
        raise OutOfGrammar(f"token {token} is not one that the grammar allows ({self._find_error()})")

    def _go_alone(self) -> None:
        self._limit.set()
        self._alone, self._matcher = True, self._begin()
        for token in self._taken:
            self._find_mask()  # as all did who came here first
            self._matcher.consume_token(token)

    def _begin(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self._text, log_level=0)

    def _find_mask(self) -> Words:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]

    def _find_error(self) -> str:
        return self._matcher.get_error().partition("\n")[0]


def _read_tokenizer(model: Path, vocabulary: int) -> LLTokenizer:
    with _READING:  # or several that begin at once would each read it
        return _read_once(model, vocabulary)


@lru_cache(16)
def _read_once(model: Path, vocabulary: int) -> LLTokenizer:
    try:
        return LLTokenizer(str(model / "tokenizer.json"), n_vocab=vocabulary)
    except (ValueError, OSError, RuntimeError) as error:  # a kind that it does not know, or none of this form
        raise BadSchema(f"the model's tokenizer is not one that grammars can be made over ({error})") from None
