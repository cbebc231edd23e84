"""Parsing: the same answer whatever the pieces it arrives in, nothing half given out, and nothing guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.gateway.tool_calls import PLAIN, find
from strop.gateway.tool_calls.base import ParsedCall
from strop.gateway.tool_calls.families import FAMILIES, HERMES
from strop.gateway.tool_calls.reader import Grammar
from tests.unit.gateway.tool_calls.feeding import Heard, hear
from tests.unit.gateway.tool_calls.templates import TOOLS

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ParsedCall("add", {"a": 1})
QWEN3 = find("<tool_call> <think> </think>")
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=30)


def family(name: str) -> Grammar:
    return next(grammar for grammar in FAMILIES if grammar.name == name)


@pytest.mark.parametrize(
    ("text", "words", "calls", "malformed"),
    [
        ("", "", 0, 0),
        ("plain < text <tool> \n", "plain < text <tool> \n", 0, 0),
        (CALL, "", 1, 0),
        (f"Let me see.\n\n{CALL}\n{CALL} \n", "Let me see.", 2, 0),
        (f"{CALL}\nand then", "and then", 1, 0),
        (f"a {CALL} b", "a b", 1, 0),
        (f"a {CALL}\n{CALL}\nb {CALL}\n", "a\nb", 3, 0),
        ("x\n<tool_call>{oops}</tool_call>", "x\n<tool_call>{oops}</tool_call>", 0, 1),
        ("<tool_call>" + CALL[11:-12], "", 1, 0),
        ("<tool_call>" + CALL[11:-14], "<tool_call>" + CALL[11:-14], 0, 1),
        ("<tool_call>" + CALL[11:-12] + "I wait.", "<tool_call>" + CALL[11:-12] + "I wait.", 0, 1),
        ("<tool_call>[]</tool_call>\n" + CALL, "<tool_call>[]</tool_call>", 1, 1),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', 0, 1),
        ('<tool_call>{"a: 1}</tool_call>\n' + CALL, '<tool_call>{"a: 1}</tool_call>', 1, 1),
        ('<tool_call>{"a: 1}</tool_call>' + CALL[:20], '<tool_call>{"a: 1}</tool_call>' + CALL[:20], 0, 2),
    ],
)
@settings(max_examples=20)
@given(sizes=SIZES)
def test_tool_calls(text: str, words: str, calls: int, malformed: int, sizes: list[int]) -> None:
    assert hear(HERMES, text, sizes=sizes) == Heard(words, "", [ADD] * calls, malformed)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[1]",
        "[" * 9000,
        '{"name": "f"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
    ],
)
def test_what_is_no_call(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert hear(HERMES, text) == Heard(text, "", [], 1)


def test_a_closing_tag_within_a_string_closes_nothing() -> None:
    code = 'print("</tool_call>")\n'
    text = '<tool_call>{"name": "f", "arguments": {"code": "print(\\"</tool_call>\\")\\n"}}</tool_call>'
    assert hear(HERMES, text, sizes=[3]).calls == [ParsedCall("f", {"code": code})]


@pytest.mark.parametrize(
    ("lead", "text", "heard"),
    [
        ("", "<think>\nSo.\n\nYes. </think>\n\nIt is.\n", ("It is.\n", "So.\n\nYes.", 0)),
        ("", f"<think>a</think>\n{CALL}", ("", "a", 1)),
        ("", "<think>\n\n</think>\n\nIt is.", ("It is.", "", 0)),
        ("", "It < is. <think>So.</think> Or?", ("It < is. Or?", "So.", 0)),
        ("", f"<think>a {CALL} b", ("", f"a {CALL} b", 0)),
        ("", "</think>\n\nIt is.", ("It is.", "", 0)),
        ("", "It is.</think> Is it?", ("It is.</think> Is it?", "", 0)),
        ("<|im_start|>assistant\n<think>\n", "So.\n</think>\n\nIt is.", ("It is.", "So.", 0)),
        ("<|im_start|>assistant\n<think>\n", "So. </thi", ("", "So. </thi", 0)),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "\nIt is.", ("It is.", "", 0)),
        ("<|im_start|>assistant\n</think>", "\n\nIt is.", ("It is.", "", 0)),
        ("<|im_start|>assistant\n", "\nIt is.", ("\nIt is.", "", 0)),
        ("<|im_start|>assistant\nIt", " is.", (" is.", "", 0)),
        ("<|im_start|>assistant\nIt ", "is.", ("is.", "", 0)),
        ("<|im_start|>assistant\nIt <tool", "box>", ("box>", "", 0)),
        ("<|im_start|>assistant\nIt <tool", CALL[5:], ("", "", 1)),
        ("<|im_start|>assistant\n" + CALL[:30], CALL[30:], ("", "", 1)),
        ("<|im_start|>assistant\n" + CALL[:30], "oops</tool_call>", ("oops</tool_call>", "", 0)),
        ("<|im_start|>assistant\n" + CALL, "\nDone.", ("Done.", "", 0)),
        ("<|im_start|>assistant\n<think>\n" + CALL[:30], CALL[30:] + " and", ("and", "", 1)),
        ("<|im_start|>assistant\n<think>\nSo", " it </think> is", ("is", " it", 0)),
    ],
)
@settings(max_examples=20)
@given(sizes=SIZES)
def test_reasoning_and_leads(lead: str, text: str, heard: tuple[str, str, int], sizes: list[int]) -> None:
    found = hear(QWEN3, text, sizes=sizes, lead=lead)
    assert (found.words, found.thoughts, len(found.calls)) == heard
    assert found.calls == [ADD] * heard[2]


def test_without_calls_reasoning_is_still_apart() -> None:
    assert hear(QWEN3, f"<think>a</think>\n{CALL}", sizes=[1], calls=False) == Heard(CALL, "a", [], 0)


WEATHER = ParsedCall("get_weather", {"city": "Paris, France", "days": 3})


@pytest.mark.parametrize(
    ("format", "text", "words", "thoughts", "calls"),
    [
        ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", "", [ParsedCall("now", {})]),
        ("granite", "<response>Yes.</response>", "Yes.", "", []),
        ("lfm2", '<|tool_call_start|>[get_weather(city="Paris, France", days=3)]<|tool_call_end|>Hm.', "Hm.", "",
         [WEATHER]),
        ("pythonic", "[get_weather(city='Paris, France', days=3), now()]", "", "", [WEATHER, ParsedCall("now", {})]),
        ("pythonic", "See [1], [f] and [g(x)].", "See [1], [f] and [g(x)].", "", []),
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris, France</arg_value><arg_key>days"
         "</arg_key><arg_value>3</arg_value></tool_call>", "", "", [WEATHER]),
        ("glm", "<tool_call>other<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>c d"
         "</arg_value></tool_call>", "", "", [ParsedCall("other", {"a": 1, "b": "c d"})]),
        ("seed", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris, France</parameter>\n<parameter=days>"
         "3</parameter>\n</function>\n</seed:tool_call>", "", "", [WEATHER]),
        ("qwen-xml", "<function=get_weather>\n<parameter=days>\n3\n</parameter>\n</function> Hm.", "Hm.", "",
         [ParsedCall("get_weather", {"days": 3})]),
        ("llama-json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", "",
         [ParsedCall("now", {})] * 2),
        ("llama-json", '{"type": "function", "name": "now", "parameters": {}}', "", "", [ParsedCall("now", {})]),
        ("llama-json", '{"name": "Ann", "age": 3} {"a": [1]}.', '{"name": "Ann", "age": 3} {"a": [1]}.', "", []),
        ("xlam", 'Hm [1] [{"name": "now", "arguments": {}}]', "Hm [1]", "", [ParsedCall("now", {})]),
        ("command", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", "", []),
        ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"a": 1}', "", "",
         [ParsedCall("now", {}), ParsedCall("now", {"a": 1})]),
        ("harmony", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
         "<|constrain|>json<|message|>{}", "", "So.", [ParsedCall("now", {})]),
        ("harmony", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>First."
         "<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "First.Yes.", "So.", []),
        ("harmony", ' to=functions.now<|channel|>commentary json<|message|>{"a": {}}', "", "",
         [ParsedCall("now", {"a": {}})]),
        ("functionary-v3.2", "all\nHm.>>>now\n{}", "Hm.", "", [ParsedCall("now", {})]),
        ("hunyuan", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", "", [ParsedCall("now", {})]),
        ("gemma4", '<|tool_call>call:now{a:{<|"|>b c<|"|>:[<|"|>d,}<|"|>,-1.5]},e:[]}<tool_call|>', "", "",
         [ParsedCall("now", {"a": {"b c": ["d,}", -1.5]}, "e": []})]),
        ("functiongemma", "<start_function_call>call:get_weather{city:<escape>7<escape>,days:3}<end_function_call>", "",
         "", [ParsedCall("get_weather", {"city": "7", "days": 3})]),
    ],
)  # fmt: skip
@settings(max_examples=20)
@given(sizes=SIZES)
def test_families(format: str, text: str, words: str, thoughts: str, calls: list[ParsedCall], sizes: list[int]) -> None:
    lead = {"harmony": "<|start|>assistant", "functionary-v3.2": "assistant\n\n>>>"}.get(format, "")
    found = hear(family(format), text, sizes=sizes, tools=TOOLS, lead=lead)
    assert (found.words, found.thoughts, found.calls) == (words, thoughts, calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}}<｜tool▁call▁end｜>"),
        ("kimi-k2", "<|tool_calls_section_begin|>oops<|tool_calls_section_end|>"),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]'),
        ("mistral", "[TOOL_CALLS]oops"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b'),
        ("llama-json", '{"name": "f", "parameters": {"a"}}'),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a}<tool_call|>"),
        ("minimax-m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>]<]minimax[>[</b>]<]minimax[>[</invoke>'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{oops}"),
    ],
)  # fmt: skip
@settings(max_examples=20)
@given(sizes=SIZES)
def test_malformed_calls_stay_as_they_are(format: str, text: str, sizes: list[int]) -> None:
    text = f"x \n{text}"
    assert hear(family(format), text, sizes=sizes) == Heard(text, "", [], 1)


def test_good_calls_beside_a_malformed_one() -> None:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    good, bad = (f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{body}<｜tool▁call▁end｜>" for body in ("{}", "{"))
    found = hear(family("deepseek-v3.1"), f"Hm. {begin}{good}\n{bad}{good}{end}", sizes=[1])
    assert found == Heard(f"Hm.\n{bad}", "", [ParsedCall("f", {})] * 2, 1)


def test_calls_come_out_one_by_one() -> None:
    """So that an agent that wants one call at a time gets one."""
    parser = family("mistral").parser([], calls=True, lead="")
    assert parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}') == [ParsedCall("f", {})]
    assert parser.feed(', {"name": "g", "arguments": {}}]') == [ParsedCall("g", {})]
    assert parser.close() == []


@pytest.mark.parametrize("grammar", [*FAMILIES, PLAIN], ids=lambda grammar: grammar.name)
@settings(max_examples=40)
@given(data=st.data())
def test_any_junk_reads_the_same_in_any_pieces(grammar: Any, data: st.DataObject) -> None:
    marks = sorted({*grammar.marks, *(mark for pair in grammar.thoughts for mark in pair), *(grammar.head or ())})
    opens = [*(grammar.syntax.opens if grammar.syntax else ()), *(grammar.head or ())]
    bits = [*marks, *opens, *opens, "a", " ", "\n", "f(a=1)", "{", "}", "[", "]", '"', ",", ":", "<", "name", "1",
            '{"name": "f", "arguments": {"a": "}"}}', '{"name": "f", "parameters": {}}', "{}", "f{a:1}"]  # fmt: skip
    junk = st.lists(st.sampled_from(bits), max_size=14).map("".join)
    lead, text = data.draw(junk) if data.draw(st.booleans()) else "", data.draw(junk)
    whole = hear(grammar, text, lead=lead)
    assert hear(grammar, text, lead=lead, sizes=[1]) == whole
    assert hear(grammar, text, lead=lead, sizes=data.draw(SIZES)) == whole
    rest = iter(text)
    assert all(letter in rest for letter in whole.words), "nothing is said that was not written"


@pytest.mark.parametrize("grammar", [*FAMILIES, PLAIN], ids=lambda grammar: grammar.name)
@settings(max_examples=20)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{>]}|")))
def test_words_stay_words(grammar: Any, text: str) -> None:
    assert hear(grammar, text, sizes=[2]) == Heard(text, "", [], 0)


def test_special_tokens_with_a_meaning() -> None:
    assert HERMES.marks == {"<tool_call>", "</tool_call>"}
    assert QWEN3.marks == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"} <= family("harmony").marks
    assert not {"<|return|>", "<|call|>"} & family("harmony").marks, "these end an answer"
    assert {"[TOOL_CALLS]", "[ARGS]"} <= family("mistral-v11").marks
    assert {"<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"} <= family("deepseek-v3").marks
    assert {"<|open|>", "<|close|>", "<|sep|>"} <= family("kimi-k3").marks


def test_find_is_in_order() -> None:
    names = [grammar.name for grammar in FAMILIES]
    for grammar in FAMILIES:
        first = find(" ".join(grammar.known_by)).name
        assert names.index(first) <= names.index(grammar.name)
        assert first == grammar.name or grammar.name in ("gigachat-3.0",), (first, grammar.name)


def test_forced() -> None:
    assert HERMES.begin_call(None) == "<tool_call>\n"
    assert HERMES.begin_call("f") == '<tool_call>\n{"name": "f", "arguments":', "a space would be a token of its own"
    assert PLAIN.begin_call("f") is None
    assert family("functionary-v3.2").begin_call(None) is None, "its generation prompt begins every message"
    assert family("functionary-v3.2").begin_call("f") == "f\n"
