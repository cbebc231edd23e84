"""Where thinking begins and ends is told by the end of the very prompt that is answered, and it can be switched."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from strop.errors import ConfigError
from strop.gateway.dialects.base import ApiError
from strop.gateway.dialects.messages import Messages
from strop.gateway.dialects.responses import Responses
from strop.gateway.template import Renderer
from tests.chatml import TEMPLATE
from tests.unit.gateway.test_session import TOOLS, Desk, said, user

DATA = Path(__file__).parents[4] / "shared" / "data"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

HYBRID = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if '/no_think' in messages[0].content or messages[-1].role == 'tool' or "
    "(enable_thinking is defined and not enable_thinking) %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}",
)
"""Thinks unless it is told not to, by the system prompt or a variable, and never about what a tool said."""
NO_HEADER = TEMPLATE.replace(
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n<think>\n{% endif %}",
)
"""As DeepSeek R1: nothing at all is written behind what a tool said."""


def desk(renderer: Renderer, template: str) -> Desk:
    return Desk(Renderer(renderer.tokenizer, template, specials={"eos_token": "<|im_end|>"}))


def answered(turn: Any) -> tuple[str, str, list[str]]:
    calls = [call["function"]["name"] for call in turn.answer.get("tool_calls", [])]
    return turn.answer.get("reasoning_content", ""), turn.answer["content"], calls


def test_thinking_that_the_system_prompt_switched_off(renderer: Renderer) -> None:
    hybrid = desk(renderer, HYBRID)
    thinking = hybrid.ask([user("hi")], "I see.\n</think>\n\nHello!", tools=TOOLS)
    assert answered(thinking) == ("I see.", "Hello!", [])
    off = {"role": "system", "content": "Be brief. /no_think"}
    silent = hybrid.ask([off, user("hi")], f"Hello!\n{CALL}", tools=TOOLS)
    assert hybrid.renderer.decode(silent.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert answered(silent) == ("", "Hello!", ["add"])


def test_thinking_that_ends_with_a_tools_result(renderer: Renderer) -> None:
    hybrid = desk(renderer, HYBRID)
    first = hybrid.ask([user("hi")], f"I see.\n</think>\n\n{CALL}", tools=TOOLS)
    assert answered(first) == ("I see.", "", ["add"])
    result = {"role": "tool", "tool_call_id": first.answer["tool_calls"][0]["id"], "content": "2"}
    then = hybrid.ask([user("hi"), said(first), result], "It is 2.", tools=TOOLS)
    assert (then.parent, then.branch) == (first.id, None)
    assert answered(then) == ("", "It is 2.", [])
    again = hybrid.ask(
        [user("hi"), said(first), result, said(then), user("sure?")], "So.\n</think>\n\nYes.", tools=TOOLS
    )
    assert answered(again) == ("So.", "Yes.", [])


def test_a_prompt_that_opens_thinking_where_others_do_not(renderer: Renderer) -> None:
    shut = TEMPLATE.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if '/think' in messages[0].content %}<think>\n{% endif %}{% endif %}{# </think> #}",
    )
    other = desk(renderer, shut)
    assert answered(other.ask([user("hi")], "Hello!")) == ("", "Hello!", [])
    cut = other.ask([user("/think hi")], "I see. I see.")
    assert answered(cut) == ("I see. I see.", "", [])


def test_nothing_written_behind_a_tools_result(renderer: Renderer) -> None:
    other = desk(renderer, NO_HEADER)
    first = other.ask([user("hi")], f"I see.\n</think>\n\n{CALL}", tools=TOOLS)
    result = {"role": "tool", "tool_call_id": first.answer["tool_calls"][0]["id"], "content": "2"}
    then = other.ask([user("hi"), said(first), result], "It is 2.", tools=TOOLS)
    assert answered(then) == ("", "It is 2.", [])


def test_thinking_that_a_template_opens_with_the_users_words(renderer: Renderer) -> None:
    """Some write who speaks next behind every user's message, whether an answer is asked for or not."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n{% if '/no_think' in m.content %}</think>\n{% endif %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    other = desk(renderer, template)
    assert answered(other.ask([user("hi")], "I see.\n</think>\n\nHello!")) == ("I see.", "Hello!", [])
    assert answered(other.ask([user("ho")], "I see. I see.")) == ("I see. I see.", "", [])
    assert answered(other.ask([user("hi /no_think")], "Hello!")) == ("", "Hello!", [])


def test_a_demanded_call_ends_the_thinking_that_this_prompt_opens(renderer: Renderer) -> None:
    hybrid = desk(renderer, HYBRID)
    body = ' {"a": 1}}\n</tool_call>'
    thinking = hybrid.ask([user("hi")], body, tools=TOOLS, tool_choice="required")
    assert thinking.requested["lead"].startswith("</think>")
    assert answered(thinking) == ("", "", ["add"])
    off = {"role": "system", "content": "/no_think"}
    silent = hybrid.ask([off, user("hi")], body, tools=TOOLS, tool_choice="required")
    assert "</think>" not in silent.requested["lead"], "it is closed already"
    assert hybrid.renderer.decode(silent.prompt_ids).count("</think>") == 1
    assert answered(silent) == ("", "", ["add"])


def test_other_families_thinking_is_ended_by_their_own_mark(renderer: Renderer) -> None:
    other = desk(renderer, HYBRID.replace("think>", "seed:think>"))
    thinking = other.ask([user("hi")], ' {"a": 1}}\n</tool_call>', tools=TOOLS, tool_choice="required")
    assert thinking.requested["lead"].startswith("</seed:think>")
    assert answered(thinking) == ("", "", ["add"])


def test_an_answer_that_is_begun_is_no_thought(renderer: Renderer) -> None:
    hybrid = desk(renderer, HYBRID)
    for chat in ([user("hi")], [{"role": "system", "content": "/no_think"}, user("hi")]):
        begun = [*chat, {"role": "assistant", "content": "The answer is"}]
        turn = hybrid.ask(begun, " 12.", continue_final_message=True)
        assert answered(turn) == ("", "The answer is 12.", [])
        assert hybrid.renderer.decode(turn.prompt_ids).endswith("</think>\n\nThe answer is")
        then = hybrid.ask([*chat, said(turn), user("sure?")], "yes")
        assert (then.parent, then.branch) == (turn.id, None)
    thought = [user("hi"), {"role": "assistant", "content": "I see.\n</think>\n\nThe answer is"}]
    turn = hybrid.ask(thought, " 12.", continue_final_message=True)
    assert hybrid.renderer.decode(turn.prompt_ids).count("</think>") == 1, "the agent has ended it itself"


def restored(place: Desk) -> Desk:
    """The same attempt at a gateway that was started anew."""
    other = Desk(place.renderer)
    other.session.restore(place.store.turns)
    return other


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def test_thinking_is_switched_by_a_request(renderer: Renderer) -> None:
    hybrid = desk(renderer, HYBRID)
    off = hybrid.ask([user("hi")], "Hello!", chat_template_kwargs=OFF)
    assert hybrid.renderer.decode(off.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert answered(off) == ("", "Hello!", [])
    assert off.requested["chat_template_kwargs"] == OFF
    on = hybrid.ask([user("hi")], "I see.\n</think>\n\nHello!")
    assert answered(on) == ("I see.", "Hello!", [])
    assert on.branch == "changed_kwargs"
    for place in (hybrid, restored(hybrid)):
        chat = [user("hi"), said(off), user("sure?")]
        then = place.ask(chat, "yes", chat_template_kwargs=OFF)
        assert (then.parent, then.shared, then.branch) == (off.id, len(off.ids), None)
        other = place.ask(chat, "Well.\n</think>\n\nyes", chat_template_kwargs=ON)
        assert other.branch == "changed_kwargs", "what was served without thinking is another context"
        assert other.parent is not None
        assert answered(other) == ("Well.", "yes", [])


def test_the_policy_has_the_default_and_the_request_goes_before_it(renderer: Renderer) -> None:
    specials = {"eos_token": "<|im_end|>"}
    place = Desk(Renderer(renderer.tokenizer, HYBRID, specials=specials, variables=OFF))
    silent = place.ask([user("hi")], "Hello!")
    assert answered(silent) == ("", "Hello!", [])
    assert silent.requested["chat_template_kwargs"] == OFF, "what was in force is on the turn"
    same = place.ask([user("hi")], "Hello!", chat_template_kwargs=OFF)
    assert same.prompt_ids == silent.prompt_ids
    assert same.branch is None
    asked = place.ask([user("ho")], "I see.\n</think>\n\nHello!", chat_template_kwargs=ON)
    assert answered(asked) == ("I see.", "Hello!", [])
    then = restored(place).ask([user("ho"), said(asked), user("sure?")], "yes", chat_template_kwargs=ON)
    assert (then.parent, then.branch) == (asked.id, None)


def test_variables_that_no_template_reads_are_refused(renderer: Renderer) -> None:
    hybrid = desk(renderer, HYBRID)
    for unknown in ({"enable_thinkin": True}, {"messages": []}, {"add_generation_prompt": False}):
        with pytest.raises(
            ApiError, match=f"does not read {min(unknown)}. Fix: leave it out.* reads enable_thinking"
        ) as told:
            hybrid.ask([user("hi")], "Hello!", chat_template_kwargs=unknown)
        assert told.value.param == "chat_template_kwargs"
    with pytest.raises(ApiError, match="cannot be switched"):
        desk(renderer, TEMPLATE).ask([user("hi")], "Hello!", chat_template_kwargs=OFF)
    with pytest.raises(ConfigError, match=r"policy\.chat_template_kwargs: .* does not read thinking"):
        Renderer(renderer.tokenizer, HYBRID, specials={"eos_token": "<|im_end|>"}, variables={"thinking": True})


EFFORT = HYBRID.replace("{%- if tools %}", "Effort: {{ reasoning_effort | default('some') }}\n{%- if tools %}", 1)


def test_effort_reaches_a_template_that_knows_it(renderer: Renderer) -> None:
    place = desk(renderer, EFFORT)
    high = place.ask([user("hi")], "I see.\n</think>\n\nHello!", reasoning_effort="high")
    assert place.renderer.decode(high.prompt_ids).startswith("Effort: high")
    assert answered(high) == ("I see.", "Hello!", [])
    none = place.ask([user("hi")], "Hello!", reasoning_effort="none")
    assert answered(none) == ("", "Hello!", []), "no effort is no thinking"
    named = place.ask([user("hi")], "Well.\n</think>\n\nHello!", reasoning_effort="none", chat_template_kwargs=ON)
    assert answered(named) == ("Well.", "Hello!", []), "what is named goes before what follows from something else"
    plain = desk(renderer, TEMPLATE)
    turn = plain.ask([user("hi")], "Hello!", reasoning_effort="high")
    assert turn.requested == {"reasoning_effort": "high"}, "accepted and recorded where nothing can be done about it"


def switched(place: Desk, dialect: Any, body: dict[str, Any]) -> Any:
    return place.route.asked_by(dialect.read(json.dumps(body).encode())).renderer.variables


def test_every_api_has_its_own_word_for_it(renderer: Renderer) -> None:
    place = desk(renderer, EFFORT)
    claude: dict[str, Any] = {"max_tokens": 9, "messages": [user("hi")]}
    assert switched(place, Messages(), claude) == {}
    assert switched(place, Messages(), claude | {"thinking": {"type": "disabled"}}) == OFF
    assert switched(place, Messages(), claude | {"thinking": {"type": "enabled", "budget_tokens": 1024}}) == ON
    assert switched(place, Messages(), claude | {"chat_template_kwargs": OFF}) == OFF
    much = switched(place, Messages(), claude | {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}})
    assert much == OFF | {"reasoning_effort": "low"}
    assert switched(place, Responses(), {"input": "hi", "reasoning": {"effort": "none"}}) == OFF
    assert switched(place, Responses(), {"input": "hi", "reasoning": {"effort": "high"}}) == ON | {
        "reasoning_effort": "high"
    }
    alone = desk(renderer, TEMPLATE + "{{ reasoning_effort }}")
    assert switched(alone, Responses(), {"input": "hi", "reasoning": {"effort": "none"}}) == {
        "reasoning_effort": "none"
    }
    assert switched(place, Responses(), {"input": "hi", "reasoning": {"summary": "auto"}}) == {}
    assert switched(place, Responses(), {"input": "hi", "chat_template_kwargs": ON}) == ON
    assert switched(desk(renderer, TEMPLATE), Messages(), claude | {"thinking": {"type": "disabled"}}) == {}


@cache
def tokenizer_of(folder: str) -> Tokenizer:
    """Reading one takes a second."""
    return Tokenizer.from_str(
        gzip.decompress((DATA / "tokenizers" / folder / "tokenizer.json.gz").read_bytes()).decode()
    )


TEMPLATES = [
    ("qwen3", "llama.cpp/Qwen-QwQ-32B.jinja", {}, False),
    ("qwen3", "llama.cpp/Qwen-QwQ-32B.jinja", {"chat_template_kwargs": ON}, True),
    ("qwen3", "llama.cpp/Qwen-Qwen3-0.6B.jinja", {}, False),
    ("qwen3", "llama.cpp/Qwen-Qwen3-0.6B.jinja", {"chat_template_kwargs": OFF}, False),
    ("qwen3", "llama.cpp/Qwen-Qwen3-0.6B.jinja", {"reasoning_effort": "none"}, False),
    ("qwen3", "llama.cpp/GLM-4.6.jinja", {"chat_template_kwargs": OFF}, False),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", {"chat_template_kwargs": ON}, True),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja", {"chat_template_kwargs": {"thinking": True}}, True),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja", {"reasoning_effort": "low"}, True),
    ("qwen3", "llama.cpp/NVIDIA-Nemotron-Nano-v2.jinja", {}, True),
    ("qwen3", "llama.cpp/NVIDIA-Nemotron-Nano-v2.jinja", {"system": "/no_think"}, False),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", {}, False),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja", {}, False),
]


@pytest.mark.parametrize(("folder", "name", "how", "thinks"), TEMPLATES)
def test_templates_of_every_kind(folder: str, name: str, how: dict[str, Any], thinks: bool) -> None:
    if not (path := DATA / "chat_templates" / name).exists():
        pytest.skip(f"{path} is not here")
    place = Desk(
        Renderer(tokenizer_of(folder), path.read_text("utf-8"), specials={"eos_token": "<|im_end|>"}, stops=[1])
    )
    system = [{"role": "system", "content": how["system"]}] if "system" in how else []
    turn = place.ask([*system, user("hi")], "Hello!", tools=TOOLS, **{k: v for k, v in how.items() if k != "system"})
    assert answered(turn) == (("Hello!", "", []) if thinks else ("", "Hello!", []))
