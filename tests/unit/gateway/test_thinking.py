"""Where thinking begins and ends is told by the end of the very prompt that is answered, never by another one."""

from pathlib import Path
from typing import Any

import pytest

from strop.gateway.render import Renderer
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
    for messages in ([user("hi")], [{"role": "system", "content": "/no_think"}, user("hi")]):
        begun = [*messages, {"role": "assistant", "content": "The answer is"}]
        turn = hybrid.ask(begun, " 12.", continue_final_message=True)
        assert answered(turn) == ("", "The answer is 12.", [])
        assert hybrid.renderer.decode(turn.prompt_ids).endswith("</think>\n\nThe answer is")
        then = hybrid.ask([*messages, said(turn), user("sure?")], "yes")
        assert (then.parent, then.branch) == (turn.id, None)
    thought = [user("hi"), {"role": "assistant", "content": "I see.\n</think>\n\nThe answer is"}]
    turn = hybrid.ask(thought, " 12.", continue_final_message=True)
    assert hybrid.renderer.decode(turn.prompt_ids).count("</think>") == 1, "the agent has ended it itself"


TEMPLATES = [
    ("qwen3", "llama.cpp/Qwen-QwQ-32B.jinja", {}, False),
    ("qwen3", "llama.cpp/NVIDIA-Nemotron-Nano-v2.jinja", {}, True),
    ("qwen3", "llama.cpp/NVIDIA-Nemotron-Nano-v2.jinja", {"system": "/no_think"}, False),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", {}, False),
    ("deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja", {}, False),
]


@pytest.mark.parametrize(("folder", "name", "how", "thinks"), TEMPLATES)
def test_templates_of_every_kind(folder: str, name: str, how: dict[str, Any], thinks: bool) -> None:
    if not (path := DATA / "chat_templates" / name).exists():
        pytest.skip(f"{path} is not here")
    renderer = Renderer.from_parts(DATA / "tokenizers" / folder, path.read_text("utf-8"))
    place = Desk(renderer)
    chat = [{"role": "system", "content": how["system"]}, user("hi")] if "system" in how else [user("hi")]
    turn = place.ask(chat, "Hello!", tools=TOOLS)
    assert answered(turn) == (("Hello!", "", []) if thinks else ("", "Hello!", []))
