"""Every family's calls, drawn at random under the grammars of answers and read by its own reader: they are calls, of
tools that are there, and an independent validator finds that their arguments follow the tools' schemas."""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from tokenizers import Tokenizer

from strop.gateway.answer_grammar import AnswerForm, CallableTool, NoForm
from strop.gateway.tool_calls.arguments import Json, Python
from strop.gateway.tool_calls.base import ParsedCall
from strop.gateway.tool_calls.families import FAMILIES
from strop.gateway.tool_calls.reader import Grammar
from strop.models.grammar import BadSchema, OutOfGrammar, TokenMatcher
from tests.parity.call_answers import Model, Read, draw_answer, find_wrong
from tests.parity.test_schemas import DATA, list_recorded, make_schema
from tests.unit.gateway.tool_calls.templates import TEMPLATES, Template, needs_templates
from tests.unit.models.test_grammar import NANO

LEADS = {"harmony": "<|start|>assistant", "functionary-v3.2": ">>>"}
"""Of families whose prompts begin every answer so."""
NO_FORM = {"muse", "gigachat-3.0"}
NO_WORDS = {*NO_FORM, "functionary-v3.2"}
"""No grammar tells their calls from words."""
WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": -5, "maximum": 500},
        "share": {"type": "number"},
        "hot": {"type": "boolean"},
        "unit": {"enum": ["c", "f"]},
        "since": {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}$"}, {"type": "null"}]},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "hot", "unit", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "tag": {"type": "string"}},
            "required": ["tag"],
            "additionalProperties": False,
        }
    },
}
NOW: Any = {"type": "object", "properties": {"zone": {"type": "string"}}, "additionalProperties": False}
STRICT = [CallableTool("get_weather", WEATHER, True), CallableTool("now", NOW, True)]
MIXED = [STRICT[0], CallableTool("now", NOW, False)]
ROUNDS = int(os.environ.get("STROP_TEST_ROUNDS", "3"))
QUICK = ("harmony", "gemma4", "hermes", "llama-json", "pythonic", "qwen-xml")
EACH = list({family.name: family for family in FAMILIES}.values())
FAMILIES_ONCE = [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.slow, id=one.name) for one in EACH]
"""One of each way to write calls is tried quickly."""

models: dict[tuple[str, bool], Model] = {}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def model_of(format: Grammar, spelled: bool, folder: Path) -> Model:
    """The model in the box, its tokenizer with tokens for the family's marks, or without."""
    if (format.name, spelled) not in models:
        tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
        models[format.name, spelled] = Model(folder, tokenizer, format, ["<|im_end|>"], spelled=spelled)
    return models[format.name, spelled]


def list_wishes(format: Grammar) -> list[str]:
    """What leads somewhere in words, whole and in part."""
    head = "".join(format.head or ())
    opens = [*(format.syntax.opens if format.syntax else ()), *(mark for pair in format.thoughts for mark in pair)]
    return [
        *format.marks,
        *opens,
        *opens,
        *[head] * 6,
        (format.head or ("",))[0] + "get_weather",
        '{"name"',
        "[now(",
        "{",
    ]


def draw_all(model: Model, form: AnswerForm, wishes: list[str], rounds: int) -> Iterator[Read]:
    grammar = model.grammar(form)
    for seed in range(rounds):
        ids = draw_answer(model, grammar, random.Random(seed), wishes)
        if ids is not None:
            yield Read(model, ids, form)


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("format", FAMILIES_ONCE)
def test_calls_that_are_demanded(format: Grammar, spelled: bool, folder: Path) -> None:
    model, lead = model_of(format, spelled, folder), LEADS.get(format.name, "")
    for tools, once in ((STRICT, False), (STRICT[:1], True)):
        form = AnswerForm(lead=lead, tools=tools, required=True, once=once)
        if format.name in NO_FORM:
            with pytest.raises(NoForm, match="cannot be written by a grammar"):
                model.grammar(form)
            continue
        some = [*draw_all(model, form, [], 3 * ROUNDS)]
        assert len(some) >= (0.6 * 3 * ROUNDS if once else 1), "most answers of one call come to their end"
        for read in some:
            assert read.calls, read.text
            assert not find_wrong(read.calls, form), read.text
            assert (read.words.strip(), read.malformed) == ("", 0), read.text
            assert len(read.calls) == 1 or not once


PLACE: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "number"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WRITTEN = {
    "qwen-xml": "<tool_call>\n<function=now>\n<parameter=city>\n{0}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=note>\n{0}\n</parameter>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=now>\n<parameter=city>\n{0}\n</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>now\n<arg_key>city</arg_key>\n<arg_value>{0}</arg_value>\n</tool_call>",
    "hy3": "<tool_calls:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n<arg_key:opensource>city"
    "</arg_key:opensource>\n<arg_value:opensource>{0}</arg_value:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "minimax": '<minimax:tool_call>\n<invoke name="now">\n<parameter name="city">{0}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minicpm": '<function name="now"><param name="city"><![CDATA[{0}]]></param></function>',
    "minimax-m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="now">]<]minimax[>[<city>{0}]<]minimax[>[</city>'
    "]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "gemma4": '<|tool_call>call:now{{city:<|"|>{0}<|"|>,days:3}}<tool_call|>',
    "functiongemma": "<start_function_call>call:now{{city:<escape>{0}<escape>,days:3}}<end_function_call>",
    "deepseek-v3.2": '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n'
    '<｜DSML｜parameter name="city" string="true">{0}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|open|>argument key="city" type="string"'
    '<|sep|>{0}<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "lfm2": '<|tool_call_start|>[now(city="{0}", days=3)]<|tool_call_end|>',
    "hermes": '<tool_call>\n{{"name": "now", "arguments": {{"city": "{0}", "days": 3}}}}\n</tool_call>',
}
"""Calls as these families' models write them, with an ordinary string."""


def follow_text(model: Model, form: AnswerForm, text: str) -> None:
    """Raises `OutOfGrammar` unless this is a whole answer."""
    matcher = TokenMatcher(model.folder, model.vocabulary, model.grammar(form))
    for id in [*model.tokenizer.encode(text, add_special_tokens=False).ids, model.ends[0]]:
        matcher.find_allowed()
        matcher.take(id)


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_with_ordinary_strings_are_whole_answers(name: str, spelled: bool, folder: Path) -> None:
    format = next(family for family in FAMILIES if family.name == name)
    model = model_of(format, spelled, folder)
    form = AnswerForm(tools=[CallableTool("now", PLACE, True)], required=True, once=True)
    for text in ("Paris", "x < 3\n</para", ""):
        text = json.dumps(text)[1:-1] if name in ("hermes", "lfm2") else text
        follow_text(model, form, WRITTEN[name].format(text))
    if (name, spelled) != ("minimax-m3", True):  # there half a mark would stand before another family's token
        follow_text(model, replace(form, required=False), "So: " + WRITTEN[name].format("Paris") + " ")
    with pytest.raises(OutOfGrammar):
        follow_text(model, form, WRITTEN[name].replace("city", "town").format("Paris"))


@needs_templates
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_templates_write_in_tags_are_whole_answers(name: str, folder: Path) -> None:
    """But FunctionGemma's, which has numbers between its marks: its reader takes them without as well."""
    template = Template(name)
    format = template.format
    if format.form is None or isinstance(format.form.arguments, Json | Python) or format.name == "functiongemma":
        return
    tool = CallableTool("get_weather", PLACE, True)
    said = template.said("", [ParsedCall("get_weather", {"city": "Paris <3", "days": 3})])
    if said is None or "get_weather" not in said[1]:
        return
    form, whole = format.form, said[0] + said[1]
    begin, end = form.begin or form.before, (form.end or form.close).strip()
    text = begin[: len(begin) - len(begin.lstrip())] + whole[whole.index(begin.strip()) : whole.rindex(end) + len(end)]
    for spelled in (False, True):
        model = model_of(format, spelled, folder)
        follow_text(model, AnswerForm(tools=[tool], required=True, once=True), text)


@pytest.mark.parametrize("format", FAMILIES_ONCE)
def test_calls_among_words(format: Grammar, folder: Path) -> None:
    form, seen = AnswerForm(lead=LEADS.get(format.name, ""), tools=MIXED), Counter[str]()
    for spelled in (False, True):
        model = model_of(format, spelled, folder)
        if format.name in NO_WORDS:
            with pytest.raises(NoForm):
                model.grammar(form)
            return
        for read in draw_all(model, form, list_wishes(format), 16 * ROUNDS):
            assert not find_wrong(read.calls, form), read.text
            seen.update(words=bool(read.words.strip()), calls=len(read.calls), thoughts=bool(read.thoughts))
    assert seen["words"]
    assert seen["calls"]
    assert seen["thoughts"] or not format.thoughts


@pytest.mark.parametrize("format", FAMILIES_ONCE)
def test_a_schema_beside_tools(format: Grammar, folder: Path) -> None:
    if format.name in NO_FORM:
        return
    model, lead = model_of(format, False, folder), LEADS.get(format.name, "")
    form, seen = AnswerForm(lead=lead, schema=WEATHER, tools=MIXED), Counter[str]()
    for read in draw_all(model, form, [], 8 * ROUNDS):
        assert not find_wrong(read.calls, form), read.text
        assert read.malformed == 0, read.text
        if not read.calls:
            assert not [*Draft202012Validator(WEATHER).iter_errors(json.loads(read.words))], read.text
        seen.update(["calls" if read.calls else "words"])
    assert seen.keys() == {"calls", "words"}


THINKERS = [
    ("hermes", ("<think>", "</think>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("harmony", ("<|channel|>analysis<|message|>", "<|end|>")),
    ("kimi-k3", ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    ("solar", ("<|think|>", "<|end|>")),
]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize(("name", "pair"), THINKERS)
def test_thoughts_come_first(name: str, pair: tuple[str, str], spelled: bool, folder: Path) -> None:
    """Opened by the prompt or by the model, and with marks in them that mean nothing there."""
    known = next(family for family in FAMILIES if family.name == name)
    format = (
        known
        if known.thoughts
        else Grammar(name=f"{name} that thinks", syntax=known.syntax, form=known.form, thoughts=(pair,))
    )
    model, start = model_of(format, spelled, folder), LEADS.get(name, "")
    for form in (
        AnswerForm(lead=start + pair[0], schema=WEATHER),
        AnswerForm(lead=start, schema=WEATHER),
        AnswerForm(lead=start + pair[0], tools=STRICT, required=True),
        AnswerForm(lead=start, tools=STRICT, required=True),
    ):
        opens = format.syntax.opens[0] if format.syntax else ""
        some = [*draw_all(model, form, [f"{pair[0]}well {opens}", pair[1]], 6 * ROUNDS)]
        assert any(read.thoughts for read in some)
        for read in some:
            assert not find_wrong(read.calls, form), read.text
            if form.schema is not None:
                assert not [*Draft202012Validator(WEATHER).iter_errors(json.loads(read.words))], read.text
            else:
                assert (bool(read.calls), read.words.strip(), read.malformed) == (True, "", 0), read.text


def test_a_thought_that_is_closed_already_is_not_begun_again(folder: Path) -> None:
    hermes = next(family for family in FAMILIES if family.name == "hermes")
    format = Grammar(name="closed", syntax=hermes.syntax, form=hermes.form, thoughts=(("<think>", "</think>"),))
    model = model_of(format, False, folder)
    form = AnswerForm(lead="<think>\n\n</think>\n\n", tools=STRICT, required=True)
    for read in draw_all(model, form, ["<think>"], 2 * ROUNDS):
        assert read.text.lstrip().startswith("<tool_call>")
        assert not read.thoughts


def list_schemas() -> list[dict[str, Any]]:
    draw = random.Random(5)
    made = [make_schema(draw) for _ in range(400)]
    return [schema for schema in made if schema.get("type") == "object" and "oneOf" not in str(schema)]


def follow(format: Grammar, spelled: bool, schemas: list[dict[str, Any]], folder: Path) -> Counter[str]:
    """What became of tools with these schemas."""
    model, seen = model_of(format, spelled, folder), Counter[str]()
    for schema in schemas:
        form = AnswerForm(
            lead=LEADS.get(format.name, ""), tools=[CallableTool("f", schema, True)], required=True, once=True
        )
        try:
            some = [*draw_all(model, form, [], 2)]
        except BadSchema:
            seen["refused"] += 1
            continue
        seen["done"] += len(some)
        seen["compiled"] += 1
        for read in some:
            assert len(read.calls) == 1, (schema, read.text)
            assert not find_wrong(read.calls, form), (schema, read.text)
    return seen


@pytest.mark.parametrize("format", FAMILIES_ONCE)
def test_some_schemas_in_every_form(format: Grammar, folder: Path) -> None:
    if format.name not in NO_FORM:
        seen = follow(format, False, list_schemas()[:: max(1, 40 // ROUNDS)], folder)
        assert seen["done"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not DATA.is_dir(), reason="there are no recordings here")
@pytest.mark.parametrize("format", EACH, ids=lambda format: format.name)
def test_many_schemas_in_every_form(format: Grammar, folder: Path) -> None:
    """At least 95 % of recorded tools' can be written, whatever the family."""
    if format.name in NO_FORM:
        return
    follow(format, True, list_schemas(), folder)
    recorded = list_recorded()
    seen = follow(format, False, recorded[:: len(recorded) // 150], folder)
    assert seen["compiled"] >= 0.95 * (seen["compiled"] + seen["refused"]), seen
