"""Tools reach the model whatever its template leaves out, and nothing about them is dropped in silence."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from strop.gateway.contexts import History
from strop.gateway.dialects.base import ApiError
from strop.gateway.template import Renderer
from strop.gateway.template_check import examine
from strop.gateway.tool_prompt import ToolsWay
from strop.gateway.transcripts import SAMPLES
from strop.types import Turn
from tests.chatml import TEMPLATE
from tests.unit.gateway.test_session import Desk, said, user

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolLM2's: who speaks and the words, nothing else."""
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
"""As Gemma 2's: no system prompt, no role but two, and those in turn."""
FEW = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('system', 'user', 'assistant') %}")
"""Messages of other roles are left out without a word."""
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}{# </think> #}")
NO_RESULTS = TEMPLATE.replace(
    "{%- if message.role == 'system' and loop.first %}",
    "{%- if message.role == 'system' and loop.first or message.role == 'tool' %}",
)
"""Knows tools and calls, and leaves out what came of them."""
OWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes calls and results in a form of its own, and leaves out the tools."""
UNREAD = TEMPLATE.replace("<tool_call>", "<do>").replace("</tool_call>", "</do>")
"""Knows tools, in a form that nobody here reads."""
BUILT_IN = {"chatml": CHATML, "strict": STRICT, "few": FEW, "thinking": THINKING}

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sums ümlauts.", "parameters": {}}}]
SPECIALS = {"eos_token": "<|im_end|>"}


def made(renderer: Renderer, template: str, tools: ToolsWay = "auto") -> Renderer:
    return Renderer(renderer.tokenizer, template, specials=SPECIALS, tools=tools)


def result(turn: Turn, number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": turn.answer["tool_calls"][number]["id"], "content": content}


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_conversation_with_a_template_that_knows_no_tools(renderer: Renderer, name: str, history: History) -> None:
    found = made(renderer, BUILT_IN[name])
    assert "leaves out tools" in found.tooling.note
    assert found.format.name == "hermes"
    desk = Desk(found)
    desk.route = replace(desk.route, history=history)
    think = "Hm.\n</think>\n\n" if name == "thinking" else ""
    # Two calls at once, with a spacing that nobody else would write.
    calls = "".join(
        f"<tool_call>{call}</tool_call>\n"
        for call in ('{"name":"add",  "arguments":{"a":1}}', '{"arguments":{},"name":"add"}')
    )
    chat: list[Any] = [user("1 + 1?")]
    first = desk.ask(chat, f"{think}Let me see.\n{calls}", tools=TOOLS)
    prompt = found.decode(first.prompt_ids)
    assert "Sums ümlauts." in prompt
    assert prompt.count("<tools>") == 1
    assert [call["function"]["arguments"] for call in first.answer["tool_calls"]] == [{"a": 1}, {}]
    assert first.finish == "tool_calls"
    chat += [said(first), result(first, 0, "two"), result(first, 1, "none")]
    second = desk.ask(chat, f"{think}Two.", tools=TOOLS)
    assert "<tool_response>\ntwo\n</tool_response>\n<tool_response>\nnone\n</tool_response>" in found.decode(
        second.prompt_ids
    )
    third = desk.ask([*chat, said(second), user("sure?")], f"{think}Yes.", tools=TOOLS)
    assert found.decode(third.prompt_ids).count("<tools>") == 1
    for before, after in ((first, second), (second, third)):
        if history == "sampled":
            assert (after.parent, after.branch, after.shared) == (before.id, None, len(before.ids))
            assert after.prompt_ids[: len(before.ids)] == before.ids, "calls stay as the model wrote them"
        else:
            written = found.text(after.messages, TOOLS, generate=True)
            assert found.decode(after.prompt_ids) == written, "what a stock server would show"


@pytest.mark.parametrize("template", [*BUILT_IN.values(), NO_RESULTS, OWN])
def test_prompts_are_exact(renderer: Renderer, template: str) -> None:
    for conversation in SAMPLES:
        conversation = (
            conversation
            if template is not STRICT
            else replace(conversation, messages=[m for m in conversation.messages if m["role"] != "system"])
        )
        for history in ("sampled", "template"):
            report = examine(made(renderer, template), conversation, history=history)
            assert report.error is None
            assert report.exact or history == "template"
            assert report.equal is not False


def test_without_tools_nothing_changes(renderer: Renderer) -> None:
    chat = [{"role": "system", "content": "s"}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    found = made(renderer, CHATML)
    said = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert found.text(chat, None, generate=True) == said + "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_where_tools_stand(renderer: Renderer) -> None:
    system = [{"role": "system", "content": "Be brief."}, user("hi")]
    assert (
        made(renderer, CHATML).text(system, TOOLS, generate=True).startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    )
    assert made(renderer, CHATML).text([user("hi")], TOOLS, generate=True).startswith("<|im_start|>system\n# Tools")
    strict = made(renderer, STRICT)
    assert "first user's message" in strict.tooling.note
    text = strict.text([user("hi")], TOOLS, generate=True)
    assert text.startswith("<|im_start|>user\n# Tools")
    assert text.endswith("hi<|im_end|>\n<|im_start|>model\n")
    # What a tool said and what the user says then are one message where roles must take turns.
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"}, user("so?")]  # fmt: skip
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response>\nso?<|im_end|>" in strict.text(
        chat, TOOLS, generate=True
    )


def test_results_that_a_template_leaves_out(renderer: Renderer) -> None:
    found = made(renderer, NO_RESULTS)
    assert "leaves out results of tools" in found.tooling.note
    desk = Desk(found)
    first = desk.ask([user("1 + 1?")], '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', tools=TOOLS)
    assert "# Tools" not in found.decode(first.prompt_ids), "the template writes them itself"
    second = desk.ask([user("1 + 1?"), said(first), result(first, 0, "two")], "Two.", tools=TOOLS)
    assert "<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>" in found.decode(second.prompt_ids)
    assert (second.parent, second.branch) == (first.id, None)


NO_CALLS = TEMPLATE.replace("message.tool_calls or []", "[]")
"""Shows tools and results, and leaves out what was called, as Granite 3.3's and LFM 2.5's do."""
FORMS = {
    "hermes": ("<tool_call>", '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'),
    "granite": ("<|tool_call|>", '<|tool_call|>[{"name": "add", "arguments": {"a": "é"}}]'),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_start|>[add(a='é')]<|tool_call_end|>"),
    "glm": ("<arg_key>", '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'),
}


@pytest.mark.parametrize("name", FORMS)
def test_calls_that_a_template_leaves_out_are_written_as_its_family_does(renderer: Renderer, name: str) -> None:
    mark, form = FORMS[name]
    found = made(renderer, NO_CALLS.replace("<tool_call>", "").replace("</tool_call>", "") + f"{{# {mark} #}}")
    assert found.format.name == name
    assert "leaves out calls" in found.tooling.note
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    chat = [user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"}]  # fmt: skip
    text = found.text(chat, TOOLS, generate=True)
    assert f"<|im_start|>assistant\n{form}<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in text
    assert "# Tools" not in text
    for history in ("sampled", "template"):
        report = examine(found, SAMPLES[1], history=history)
        assert report.exact
        assert report.equal


def test_a_template_that_leaves_out_only_the_tools_keeps_its_own_calls(renderer: Renderer) -> None:
    found = made(renderer, OWN)
    assert found.format.name == "functionary-v3.1"
    assert "own form" in found.tooling.note
    desk = Desk(found)
    first = desk.ask([user("1 + 1?")], '<function=add>{"a":1}</function>', tools=TOOLS)
    assert '<function=name_of_the_function>{"name_of_an_argument": "its value"}</function>' in found.decode(
        first.prompt_ids
    )
    assert first.finish == "tool_calls"
    second = desk.ask([user("1 + 1?"), said(first), result(first, 0, "two")], "Two.", tools=TOOLS)
    assert "<|im_start|>tool\ntwo<|im_end|>" in found.decode(second.prompt_ids)
    assert (second.parent, second.branch) == (first.id, None)


@pytest.mark.parametrize(("template", "lost"), [(CHATML, "tools and calls"), (NO_RESULTS, "results of tools")])
def test_what_the_template_leaves_out_is_refused_if_that_is_set(renderer: Renderer, template: str, lost: str) -> None:
    desk = Desk(made(renderer, template, "template"))
    assert desk.ask([user("hi")], "Hello!").answer["content"] == "Hello!"
    with pytest.raises(ApiError, match=f"leaves out .*{lost}.*set policy.tools to auto, or policy.template") as told:
        desk.ask([user("hi")], "Hello!", tools=TOOLS)
    assert told.value.param == "tools"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        user("hi"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    with pytest.raises(ApiError, match="leaves out"):
        desk.ask(chat, "Hello!")


def test_calls_that_nobody_reads_are_named_and_can_be_had_otherwise(renderer: Renderer) -> None:
    found = made(renderer, UNREAD)
    assert found.format.name == "plain"
    assert "nothing here reads the calls of its family" in found.tooling.note
    other = made(renderer, UNREAD, "system")
    assert other.format.name == "hermes"
    text = other.text([user("hi")], TOOLS, generate=True)
    assert text.count(json.dumps(TOOLS[0], ensure_ascii=False)) == 1, "not by the template as well"
    assert "policy.tools is system" in other.tooling.note
    assert not made(renderer, TEMPLATE).tooling.note


def test_a_call_can_be_demanded(renderer: Renderer) -> None:
    turn = Desk(made(renderer, STRICT)).ask(
        [user("hi")], ' {"a": 1}}\n</tool_call>', tools=TOOLS, tool_choice="required"
    )
    assert [call["function"]["arguments"] for call in turn.answer["tool_calls"]] == [{"a": 1}]


@pytest.mark.parametrize("history", ["sampled", "template"])
def test_a_call_without_its_closing_mark_goes_on_as_it_was_said(renderer: Renderer, history: History) -> None:
    for template in (TEMPLATE, CHATML):
        desk = Desk(made(renderer, template))
        desk.route = replace(desk.route, history=history)
        first = desk.ask([user("hi")], '<tool_call>\n{"name": "add", "arguments": {}}\n', tools=TOOLS)
        assert first.finish == "tool_calls"
        second = desk.ask([user("hi"), said(first), result(first, 0, "two")], "Two.", tools=TOOLS)
        told = desk.renderer.decode(second.prompt_ids)
        if history == "sampled":
            assert (second.parent, second.branch) == (first.id, None)
            assert '"arguments": {}}\n<|im_end|>\n' in told, "the end of the turn stands once, and nothing was added"
        else:
            assert second.branch == "template_rewrote"
            assert told == desk.renderer.text(second.messages, TOOLS, generate=True)
