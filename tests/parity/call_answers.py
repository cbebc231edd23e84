"""Answers at random under the grammars of calls, over a real tokenizer that knows a family's marks or spells them."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jsonschema import Draft202012Validator
from tokenizers import AddedToken, Tokenizer

from strop.gateway.answer_grammar import AnswerForm, write_answer
from strop.gateway.tool_calls.base import ParsedCall, Thought
from strop.gateway.tool_calls.reader import Grammar
from strop.models.grammar import VERSION, TokenMatcher
from strop.models.lark import MarkTokens
from strop.types import AnswerGrammar

LONGEST = 1200
CLOSERS = ("}", "]", ")", ">")


class Model:
    """A tokenizer in a folder. `spelled`: it has no tokens for the marks of the family."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, format: Grammar, ends: Sequence[str], *, spelled: bool
    ) -> None:
        self.folder, self.tokenizer, self.format = folder, tokenizer, format
        if not spelled:
            marks = sorted(mark for mark in format.marks if " " not in mark and "\n" not in mark and len(mark) > 1)
            tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.vocabulary = max(tokenizer.get_vocab().values()) + 9  # some ids are nothing's, as in most models
        self.ends = tuple(sorted(id for end in ends if (id := tokenizer.token_to_id(end)) is not None))
        added = tokenizer.get_added_tokens_decoder()
        self.hidden = {id for id, token in added.items() if token.special and token.content not in format.marks}
        self.tokens = MarkTokens.of(tokenizer, self.ends)
        self.closing = [tokenizer.encode(one, add_special_tokens=False).ids[0] for one in CLOSERS]
        self.digits = {tokenizer.encode(str(digit), add_special_tokens=False).ids[0] for digit in range(10)}
        arguments = vars(format.form.arguments) if format.form else {}
        marks = (arguments.get(name) for name in ("_close", "_mark", "_space"))
        self.text_ends = ['"', *filter(None, marks), *(close for _, close in format.thoughts)]

    def grammar(self, form: AnswerForm) -> AnswerGrammar:
        return AnswerGrammar(text=write_answer(self.format, self.tokens, form), ends=self.ends, version=VERSION)

    def decode(self, ids: Sequence[int]) -> str:
        shown = [id for id in ids if id not in self.hidden and id not in self.ends]
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def spell(self, text: str, draw: random.Random) -> list[int]:
        """A text in tokens, whole or in pieces."""
        if draw.random() < 0.5:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        return [id for letter in text for id in self.tokenizer.encode(letter, add_special_tokens=False).ids]


def draw_answer(model: Model, grammar: AnswerGrammar, draw: random.Random, wishes: Sequence[str]) -> list[int] | None:
    """At random among what is allowed, the longer it gets the rather what closes something; now and then one of
    `wishes`, as far as it may come. None if it is cut off."""
    matcher, ids = TokenMatcher(model.folder, model.vocabulary, grammar), list[int]()
    wished: list[int] = []
    while len(ids) < LONGEST:
        mask = np.unpackbits(matcher.find_allowed().view(np.uint8), count=model.vocabulary, bitorder="little")
        allowed, late = np.flatnonzero(mask), len(ids) / 150
        ending = [id for id in model.ends if mask[id]]
        in_text = len(allowed) > len(mask) / 3  # of a string, a thought, words
        if not wished and wishes and draw.random() < 0.15:
            wished = model.spell(draw.choice(wishes), draw)
        if not wished and in_text and draw.random() < 0.1 + late:
            wished = model.spell(draw.choice(model.text_ends), draw)
        if wished and mask[wished[0]]:
            token = wished.pop(0)
        else:
            closing = [id for id in model.closing if mask[id] and not in_text]
            others = [id for id in allowed.tolist() if id not in model.digits] or allowed.tolist()
            if ending and draw.random() < 0.02 + late:
                token = draw.choice(ending)
            elif closing and draw.random() < 0.3 + late:
                token = closing[0]
            else:
                token = draw.choice(others if draw.random() < late else allowed.tolist())
            wished = []
        matcher.take(token)
        ids.append(token)
        if token in model.ends:
            return ids
    return None


class Read:
    def __init__(self, model: Model, ids: Sequence[int], form: AnswerForm) -> None:
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.schema}} for tool in form.tools
        ]
        self.text = model.decode(ids)
        whole = form.schema is not None
        parser = model.format.parser(tools, calls=bool(tools), lead=form.lead, whole=whole)
        pieces = parser.feed(self.text) + parser.close()
        self.malformed = parser.malformed
        self.calls = [piece for piece in pieces if isinstance(piece, ParsedCall)]
        self.words = "".join(piece for piece in pieces if isinstance(piece, str))
        self.thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))


def find_wrong(calls: Sequence[ParsedCall], form: AnswerForm) -> list[str]:
    """What in calls does not follow the tools that were given."""
    schemas = {tool.name: tool.schema if tool.held or form.required else {} for tool in form.tools}
    return [
        f"{call}: {error.message}" if call.name in schemas else f"{call}: no such tool"
        for call in calls
        for error in Draft202012Validator(schemas.get(call.name, {})).iter_errors(call.arguments)
    ] + [f"{call}: no such tool" for call in calls if call.name not in schemas]
