"""Every chat template at hand: what it writes for an assistant's message, its format reads back."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.gateway.tool_calls.base import ParsedCall
from strop.gateway.tool_calls.syntax import TaggedCalls
from tests.unit.gateway.tool_calls.feeding import hear, ids
from tests.unit.gateway.tool_calls.templates import DATA, TEMPLATES, TOOLS, Template, needs_templates, tool

pytestmark = needs_templates

FULL = ParsedCall(
    "get_weather",
    {
        "city": "Pa\"r'is\n{é} <b> \\ 雪, [x] 🙂",
        "code": " 007\n",
        "days": -3,
        "share": 0.5,
        "hot": True,
        "since": None,
        "where": {"lat": [1, 2.5], "tag": "true", "deep": {"ok": False}},
        "names": ["a", 'b"c'],
    },
)
SMALL = ParsedCall("get_weather", {"days": 3})
NOW = ParsedCall("now", {})
WORDS = "Let me see."
CASES: dict[str, tuple[str, list[ParsedCall], str]] = {
    "words": ("Hello.\n\nYou <b>", [], ""),
    "small": ("", [SMALL], ""),
    "full": ("", [FULL], ""),
    "two": ("", [FULL, NOW], ""),
    "both": (WORDS, [FULL], ""),
    "thought": ("", [FULL], "I think\nso."),
}

WRITES_NO_CALLS = {
    "llama.cpp/LFM2.5-Instruct.jinja",
    "llama.cpp/google-gemma-2-2b-it.jinja",
    "llama.cpp/ibm-granite-granite-3.3-2B-Instruct.jinja",
    "llama.cpp/llama-cpp-rwkv-world.jinja",
    "llama.cpp/microsoft-Phi-3.5-mini-instruct.jinja",
    "vllm/template_basic.jinja",
    "vllm/template_blip2.jinja",
    "vllm/template_chatglm.jinja",
    "vllm/template_chatglm2.jinja",
    "vllm/template_chatml.jinja",
    "vllm/template_deepseek_ocr.jinja",
    "vllm/template_falcon.jinja",
    "vllm/template_inkbot.jinja",
    "vllm/template_kimi_audio.jinja",
    "vllm/tool_chat_template_glm4.jinja",
}
"""Templates that leave calls out of history. Three of them (LFM2.5, Granite 3.3, vLLM's GLM 4) are of families that
make calls all the same, tested in test_reader.py; the others are plain text."""

CANNOT: dict[str, tuple[list[str], list[str]]] = {
    "one call in a message": (
        ["two"],
        [
            *(f"llama.cpp/meta-llama-Llama-3.{name}-Instruct.jinja" for name in ("1-8B", "2-3B", "3-70B")),
            "vllm/tool_chat_template_llama3.2_json.jinja",
            "llama.cpp/GigaChat3-10B-A1.8B.jinja",
            "llama.cpp/GigaChat3.1-10B-A1.8B.jinja",
            "llama.cpp/openai-gpt-oss-120b.jinja",
        ],
    ),
    "words beside a call are written as reasoning": (["both"], ["llama.cpp/openai-gpt-oss-120b.jinja"]),
    "words and calls are turns apart": (["both"], ["llama.cpp/llama-cpp-deepseek-r1.jinja"]),
    "words are written in place of calls": (["both"], ["vllm/tool_chat_template_phi4_mini.jinja"]),
    "a last message is written behind an open <think>": (
        ["words", "both"],
        ["llama.cpp/NVIDIA-Nemotron-Nano-v2.jinja"],
    ),
    "null is left out": (["full", "two", "both", "thought"], ["llama.cpp/MiniMax-M3.jinja"]),
    "strings are written without quotes": (
        ["full", "two", "both", "thought"],
        ["vllm/tool_chat_template_llama3.2_pythonic.jinja", "vllm/tool_chat_template_toolace.jinja"],
    ),
    "no commas between arguments": (
        ["full", "two", "both", "thought"],
        ["vllm/tool_chat_template_gemma3_pythonic.jinja"],
    ),
    "no assistant's words at all": (["words"], ["vllm/template_kimi_audio.jinja"]),
}
"""What a template cannot write, or not so that it could be read back: cases and templates by reason."""

template_of = cache(Template)

SHOW_THEIR_END = {
    "hermes", "deepseek-v3", "deepseek-v3.1", "kimi-k2", "solar", "gemma4", "functiongemma", "functionary-v3.1"
}  # fmt: skip
"""Families whose calls end with a brace, or the block around it."""


def reason(name: str, case: str) -> str | None:
    if CASES[case][1] and name in WRITES_NO_CALLS:
        return "writes no calls"
    return next((why for why, (cases, names) in CANNOT.items() if case in cases and name in names), None)


def written(name: str, case: str) -> tuple[str, str, str, list[ParsedCall], str] | None:
    """The lead, the text, and what of the message stands in it: words, calls, reasoning."""
    words, calls, thought = CASES[case]
    said = template_of(name).said(words, calls, thought)
    if said is None:
        return None
    lead, text = said
    if calls:  # many templates leave words out beside calls, and reasoning out of history
        words, thought = words if words in text else "", thought if thought in text else ""
    return lead, text, words, calls, thought


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_written_is_read(name: str, case: str) -> None:
    said = written(name, case)
    why = reason(name, case)
    if said is None:
        assert why, "the template refuses the message"
        return
    lead, text, words, calls, thought = said
    heard = hear(template_of(name).format, text, tools=TOOLS, lead=lead)
    same = (heard.words.strip(), heard.thoughts, heard.calls, heard.malformed) == (words, thought, calls, 0)
    assert same == (why is None), (why, heard, text)


TAGGED = [name for name in TEMPLATES if isinstance(getattr(template_of(name).format, "syntax", None), TaggedCalls)]
TAGGED = [name for name in TAGGED if name not in WRITES_NO_CALLS]


@pytest.mark.parametrize("sizes", [(), (1,)])
@pytest.mark.parametrize("name", TAGGED)
def test_a_last_call_without_its_closing_mark_is_a_call(name: str, sizes: tuple[int, ...]) -> None:
    """As other servers read it. In an answer that was cut off, only where the call itself shows that it is whole."""
    format: Any = template_of(name).format
    said = written(name, "small" if reason(name, "two") else "two")
    assert said is not None
    lead, text, _, calls, _ = said
    at = text.rfind(format.syntax.close)
    whole = format.name in SHOW_THEIR_END
    for left in ("", "\n", format.syntax.close[:3]):
        heard = hear(format, text[:at] + left, tools=TOOLS, lead=lead, sizes=sizes)
        assert (heard.words.strip(), heard.calls, heard.malformed) == ("", calls, 0)
        heard = hear(format, text[:at] + left, tools=TOOLS, lead=lead, sizes=sizes, cut=True)
        assert heard.calls == (calls if whole else calls[:-1])
        assert heard.malformed == (not whole)


@pytest.mark.parametrize("name", TAGGED)
def test_no_half_call_comes_of_an_answer_that_was_cut_off(name: str) -> None:
    said = written(name, "small")
    assert said is not None
    lead, text, _, calls, _ = said
    for length in range(len(text)):
        heard = hear(template_of(name).format, text[:length], tools=TOOLS, lead=lead, cut=True)
        assert heard.calls in ([], calls), text[:length]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in WRITES_NO_CALLS])
def test_ids_that_are_written_are_read(name: str) -> None:
    """A model gives its calls ids where its template shows it some: the agent's are those."""
    said = written(name, "two") or written(name, "small")
    assert said is not None
    lead, text, _, calls, _ = said
    found = ids(template_of(name).format, text, tools=TOOLS, lead=lead)
    if "call00000" in text:
        assert found == [f"call0000{i}" for i in range(len(calls))]
    elif template_of(name).format.name == "kimi-k2":
        assert found == ["functions.get_weather:0", "functions.now:1"]
    else:
        assert found == [None] * len(found)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), case=st.sampled_from(sorted(CASES)))
def test_pieces_change_nothing(name: str, case: str, sizes: list[int]) -> None:
    if (said := written(name, case)) is not None:
        format, (lead, text) = template_of(name).format, said[:2]
        assert hear(format, text, sizes=sizes, tools=TOOLS, lead=lead) == hear(format, text, tools=TOOLS, lead=lead)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in WRITES_NO_CALLS])
def test_without_tools_calls_are_text(name: str) -> None:
    said = written(name, "small")
    assert said is not None
    heard = hear(template_of(name).format, said[1], calls=False, lead=said[0])
    assert heard.calls == []
    assert heard.malformed == 0
    assert "get_weather" in heard.words


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in WRITES_NO_CALLS])
def test_a_call_can_be_begun_for_the_model(name: str) -> None:
    """As its template would have it; the rest of it is then all that a model says."""
    template = template_of(name)
    forced, any_tool = template.format.begin_call("get_weather"), template.format.begin_call(None)
    assert (forced is None) == (template.format.name in ("muse", "solar", "gigachat-3.0")), "names nobody's call ids"
    if forced is None:
        return
    assert any_tool is None or forced.startswith(any_tool)
    said = written(name, "small")
    assert said is not None
    whole = said[0] + said[1]
    at = whole.rfind(forced.strip())
    if template.format.name in ("granite", "phi4-mini"):  # writes its list over many lines; writes none in history
        whole, at = said[0] + forced + '{"days": 3}}]', len(said[0])
    assert at >= 0, whole
    begun = at + len(forced.strip())
    heard = hear(template.format, whole[begun:], sizes=[1], tools=TOOLS, lead=whole[:begun])
    assert (heard.words.strip(), heard.calls, heard.malformed) == ("", [SMALL], 0)


def test_plain_templates_know_no_calls() -> None:
    plain = {name for name in TEMPLATES if template_of(name).format.name == "plain"}
    assert plain == WRITES_NO_CALLS - {
        "llama.cpp/LFM2.5-Instruct.jinja",
        "llama.cpp/ibm-granite-granite-3.3-2B-Instruct.jinja",
        "vllm/tool_chat_template_glm4.jinja",
    }
    for name in plain:
        format = template_of(name).format
        assert format.begin_call("get_weather") is None
        text = '<tool_call>{"name": "now", "arguments": {}}</tool_call> [now()] {"name": "now", "parameters": {}}'
        assert hear(format, text).words == text


def schema_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema_of(inner) for key, inner in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {}}
    return {"type": {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}[type(value)]}


@cache
def real_calls() -> list[ParsedCall]:
    """Calls a model made in tau-bench, all different."""
    path = DATA.parent / "tool_transcripts" / "tau_bench_gpt4o_airline.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    found: dict[str, ParsedCall] = {}
    for line in path.read_text("utf-8").splitlines():
        for message in json.loads(line)["traj"]:
            for call in message.get("tool_calls") or []:
                made = call["function"]
                found[made["name"] + made["arguments"]] = ParsedCall(made["name"], json.loads(made["arguments"]))
    return list(found.values())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in WRITES_NO_CALLS])
def test_calls_made_by_a_model(name: str) -> None:
    why = reason(name, "full")
    if why and why != "null is left out":
        assert template_of(name).format.name == "pythonic"
        return
    for call in real_calls()[::12]:
        said = template_of(name).said("", [call])
        assert said is not None
        tools = [tool(call.name, **{key: schema_of(value) for key, value in call.arguments.items()})]
        heard = hear(template_of(name).format, said[1], sizes=[5, 1, 3], tools=tools, lead=said[0])
        assert (heard.words.strip(), heard.calls, heard.malformed) == ("", [call], 0), said[1]
