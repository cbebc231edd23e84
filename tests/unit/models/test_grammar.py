"""Masks of grammars beside a list of all texts that they allow: a token may come next if one of those goes on so."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

import strop
from strop.models.grammar import (
    UNFORCED,
    VERSION,
    BadSchema,
    GrammarLimit,
    OutOfGrammar,
    TokenMatcher,
    check_grammar,
    close_grammar,
)
from strop.models.lark import Lark, MarkTokens
from strop.types import AnswerGrammar

NANO = Path(strop.__file__).parent / "models" / "nano"
TOKENIZER = Tokenizer.from_file(str(NANO / "tokenizer.json"))
VOCABULARY = int(json.loads((NANO / "config.json").read_text())["vocab_size"])
ENDS = (1, 2)
TEXTS = [TOKENIZER.decode([id], skip_special_tokens=False) for id in range(VOCABULARY)]


def compile_schema(schema: dict[str, Any]) -> str:
    rules = Lark(MarkTokens({}, {}, ()))
    return rules.write(rules.json(schema))


def grammar_of(schema: dict[str, object]) -> AnswerGrammar:
    return AnswerGrammar(text=compile_schema(schema), ends=ENDS, version=VERSION)


def read(matcher: TokenMatcher) -> set[int]:
    bits = np.unpackbits(matcher.find_allowed().view(np.uint8), count=VOCABULARY, bitorder="little")
    return {*np.flatnonzero(bits).tolist()}


def find_next(texts: list[str], said: str) -> set[int]:
    """By comparing strings alone."""
    longer = {id for id, text in enumerate(TEXTS) if text and any(one.startswith(said + text) for one in texts)}
    return longer - {0, *ENDS} | ({*ENDS} if said in texts else set())


@pytest.mark.parametrize("seed", range(4))
def test_what_may_come_next_is_what_goes_on_as_one_of_the_texts(seed: int) -> None:
    values = ["ab", "abc", "b", "a plan to add", "12"]
    texts, draw = [json.dumps(value) for value in values], random.Random(seed)
    for _ in range(10):
        matcher, said = TokenMatcher(NANO, VOCABULARY, grammar_of({"enum": values})), ""
        while True:
            allowed = read(matcher)
            assert allowed == find_next(texts, said), said
            token = draw.choice(sorted(allowed))
            matcher.take(token)
            if token in ENDS:
                break
            said += TEXTS[token]
        assert said in texts


def test_one_matcher_knows_nothing_of_another_for_the_same_schema() -> None:
    grammar = grammar_of({"enum": ["ab", "ba"]})
    first, second = (TokenMatcher(NANO, VOCABULARY, grammar) for _ in range(2))
    before = second.find_allowed().tobytes()
    first.take(min(read(first)))
    assert second.find_allowed().tobytes() == before != first.find_allowed().tobytes()


@pytest.mark.parametrize("token", [0, *ENDS, 6, TOKENIZER.encode("a").ids[0]])
def test_a_token_that_is_forbidden_is_refused(token: int) -> None:
    """0 is what the library takes for the end of a text."""
    matcher = TokenMatcher(NANO, VOCABULARY, grammar_of({"type": "integer"}))
    with pytest.raises(OutOfGrammar, match=f"token {token} is not one that the grammar allows"):
        matcher.take(token)
    with pytest.raises(OutOfGrammar, match="the grammar cannot be followed"):
        matcher.find_allowed()


@pytest.mark.parametrize("ends", [(0,), (2,), (0, 1, 2), (7, 300)])
def test_any_token_may_be_what_ends_an_answer(ends: tuple[int, ...]) -> None:
    grammar = replace(grammar_of({"enum": ["ab", "abc"]}), ends=ends)
    for end in ends:
        matcher = TokenMatcher(NANO, VOCABULARY, grammar)
        for token in TOKENIZER.encode('"ab').ids:
            assert not read(matcher) & {*ends}
            matcher.take(token)
        assert {TEXTS[id] for id in read(matcher)} == {'"', "c", 'c"'} & {*TEXTS}
        matcher.take(TOKENIZER.encode('"').ids[0])
        assert read(matcher) == {*ends}
        matcher.take(end)


def test_a_model_without_a_tokenizer_that_can_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadSchema, match="not one that grammars can be made over"):
        TokenMatcher(tmp_path, VOCABULARY, grammar_of({}))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Odd"}}')
    with pytest.raises(BadSchema, match="not one that grammars can be made over"):
        TokenMatcher(tmp_path, VOCABULARY, grammar_of({"type": "null"}))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "rhyme"}, "rhyme"),
        ({"type": "words"}, "words"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"description": "x" * 200_000}, "characters"),
        ({"type": "string", "pattern": "("}, "regex"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_with_what_it_is(schema: dict[str, object], why: str) -> None:
    with pytest.raises(BadSchema, match=why):
        compile_schema(schema)


def test_an_id_that_is_no_uri_changes_nothing() -> None:
    """Griptape names its schemas in words."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"const": 1}}}
    assert compile_schema(schema | {"$id": "Output Format"}) == compile_schema(schema)


@pytest.mark.parametrize("divisor", [62617453, 300007, 1.00007])
def test_a_divisor_that_takes_gigabytes_is_refused(divisor: float) -> None:
    schema = {"type": "object", "properties": {"multipleOf": {"anyOf": [{"type": "integer", "multipleOf": divisor}]}}}
    with pytest.raises(BadSchema, match="multipleOf"):
        compile_schema(schema)
    compile_schema({"anyOf": [{"type": "integer", "multipleOf": 250_000}, {"enum": [{"multipleOf": divisor}]}]})


@pytest.mark.parametrize("text", ["start: T\nT: /(a\nstart: b)/", "begin: /a/"])
def test_a_grammar_has_one_root(text: str) -> None:
    for read_it in (check_grammar, lambda text: close_grammar(AnswerGrammar(text=text, ends=ENDS, version=VERSION))):
        with pytest.raises(BadSchema, match=r"a grammar that has [02] rules that are called start"):
            read_it(text)


WIDE = AnswerGrammar(
    text=f"{UNFORCED}\nstart: T\nT: /([^a]|a[^b])*/ & /(?s:.*)[0-4].{{60}}[a-z].{{60}}(?s:.*)/",
    ends=ENDS,
    version=VERSION,
)
"""Some of its texts are more than the library follows."""
TEXT = "3 1234567890 12345 67890 31231231 2312 31 23 " * 6
USUAL, MANY = (TOKENIZER.encode(text).ids for text in ("3 " + "cba 12 " * 20, TEXT))


def follow(matcher: TokenMatcher, ids: list[int]) -> list[bytes]:
    masks: list[bytes] = []
    for id in ids:
        masks.append(matcher.find_allowed().tobytes())
        matcher.take(id)
    return masks


def test_an_answer_that_comes_to_the_limit_takes_no_other_with_it() -> None:
    alone = follow(TokenMatcher(NANO, VOCABULARY, WIDE), USUAL)
    first = TokenMatcher(NANO, VOCABULARY, WIDE)
    begun, masked, lost = first.copy(), first.copy(), first.copy()
    before = follow(begun, USUAL[:20])
    assert follow(masked, USUAL[:20]) == before
    assert not first.spent
    with pytest.raises(GrammarLimit, match="too many expressions"):
        follow(lost, MANY)
    assert first.spent
    assert before + follow(begun, USUAL[20:]) == alone
    masked.take(USUAL[20])
    assert [*before, alone[20], *follow(masked, USUAL[21:])] == alone
    assert follow(first.copy(), USUAL) == alone
    with pytest.raises(OutOfGrammar, match="token 0 is not one that the grammar allows"):
        begun.take(0)
