"""Free parts of grammars beside what a reader of texts finds: everything may come, up to a mark."""

import json

import pytest

from strop.models.grammar import VERSION, TokenMatcher
from strop.models.lark import FreePart, Lark, MarkTokens
from strop.types import AnswerGrammar
from tests.unit.models.test_grammar import ENDS, NANO, TEXTS, TOKENIZER, VOCABULARY, read

CALL = TOKENIZER.token_to_id("<tool_call>")
START = TOKENIZER.token_to_id("<|endoftext|>")


def follow(text: str, ids: list[int]) -> tuple[set[int], TokenMatcher]:
    """What may come after these tokens."""
    matcher = TokenMatcher(NANO, VOCABULARY, AnswerGrammar(text=text, ends=ENDS, version=VERSION))
    for id in ids:
        matcher.take(id)
    return read(matcher), matcher


def until(mark: str) -> str:
    rules = Lark(MarkTokens.of(TOKENIZER, ENDS))
    part = FreePart(rules, [mark])
    return rules.write(f"{part.anything} {part.until(mark)} {rules.json({'const': 7})}")


@pytest.mark.parametrize(
    "ids", [[], TOKENIZER.encode("so").ids, [START], [*TOKENIZER.encode("a <tool").ids, *TOKENIZER.encode("s").ids]]
)
def test_every_token_may_come_in_a_free_part_but_those_that_end_an_answer(ids: list[int]) -> None:
    allowed, _ = follow(until("<tool_call>"), ids)
    whole = {id for id, text in enumerate(TEXTS) if "\ufffd" not in text}
    assert whole - allowed <= {*ENDS}
    assert not allowed & {*ENDS}


@pytest.mark.parametrize("spelled", [False, True])
def test_a_mark_ends_it_as_a_token_or_in_letters(spelled: bool) -> None:
    letters = [id for letter in "<tool_call>" for id in TOKENIZER.encode(letter).ids]
    said = [*TOKENIZER.encode("so ").ids, *(letters if spelled else [CALL])]
    allowed, _ = follow(until("<tool_call>"), said)
    assert {TEXTS[id] for id in allowed} == {"7"}


def test_a_token_that_readers_do_not_see_stands_in_no_mark_that_is_spelled() -> None:
    begun = [id for letter in "<tool" for id in TOKENIZER.encode(letter).ids]
    assert START not in follow(until("<tool_call>"), begun)[0]
    assert START in follow(until("<tool_call>"), [*begun, *TOKENIZER.encode("s").ids])[0]


def test_a_mark_of_tokens_and_letters_is_told_from_what_begins_like_it() -> None:
    mark = "<tool_call>go"
    for ids, ended in (
        ([CALL, *TOKENIZER.encode("go").ids], True),
        ([CALL, *TOKENIZER.encode("gx").ids], False),
        ([CALL, CALL, *TOKENIZER.encode("g").ids, *TOKENIZER.encode("o").ids], True),
    ):
        allowed = {TEXTS[id] for id in follow(until(mark), ids)[0]}
        assert (allowed == {"7"}) is ended, ids


def test_blanks_in_json_are_counted() -> None:
    rules = Lark(MarkTokens.of(TOKENIZER, ENDS))
    text = rules.write(rules.json({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}))
    blank, open = TOKENIZER.encode(" ").ids, TOKENIZER.encode('{"a":').ids
    assert blank[0] in follow(text, [*open, *blank * 15])[0]
    assert blank[0] not in follow(text, [*open, *blank * 16])[0]
    assert json.loads('{"a":' + " " * 16 + "1}") == {"a": 1}


@pytest.mark.parametrize("mark", ["\n</end>\n", "</tool_call>", "</tool_call>\n", "<\n<tool_call>"])
def test_text_gives_way_to_the_mark_that_ends_it(mark: str) -> None:
    rules = Lark(MarkTokens.of(TOKENIZER, ENDS))
    named = rules.terminal(r"/(?s:.)*/")
    text = rules.terminal(f"{named} & ~({named} {json.dumps(mark.strip())} {named})")
    grammar = rules.write(f'"(" {rules.until(text, mark)} {rules.json({"const": 7})}')
    letters = [id for letter in mark for id in TOKENIZER.encode(letter).ids]
    for said in ("", "Paris", "a\n</en", "<"):
        for ids in (TOKENIZER.encode(f"({said}{mark}").ids, [*TOKENIZER.encode(f"({said}").ids, *letters]):
            assert {TEXTS[id] for id in follow(grammar, ids)[0]} == {"7"}, said


def test_text_that_may_not_be_empty_is_not() -> None:
    rules = Lark(MarkTokens.of(TOKENIZER, ENDS))
    allowed, _ = follow(
        rules.write(f'"(" {rules.until(rules.terminal("/a{1,3}/"), "<tool_call>")}'), TOKENIZER.encode("(").ids
    )
    assert CALL not in allowed
