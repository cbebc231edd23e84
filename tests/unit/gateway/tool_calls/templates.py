"""The chat templates at hand, and what each makes of an assistant's message."""

from __future__ import annotations

import json
import re
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import SandboxedEnvironment

from strop.gateway.tool_calls import find
from strop.gateway.tool_calls.base import ParsedCall
from strop.gateway.tool_calls.reader import Grammar

DATA = Path(__file__).parents[5] / "shared" / "data" / "chat_templates"
TEMPLATES = sorted(str(path.relative_to(DATA)) for path in DATA.glob("*/*.jinja"))
needs_templates = pytest.mark.skipif(not TEMPLATES, reason=f"no chat templates in {DATA}")

USER = "Wie ist das Wetter?"
ENDS = (
    "<EOS>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|call|>", "<|calls|>", "<|return|>",
    "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|tools_suffix|>",
    "<|assistant_end|>", "<|observation|>", "<|user|>", "<|message_sep|>", "<|tool_response>", "<|end_of_msg|>",
    "<｜end▁of▁sentence｜>", "<｜hy_eos:opensource｜>", "[e~[", "<SPECIAL_12>", "<sep>", "<turn|>", "<end_of_turn>",
    "</assistant>",
)  # fmt: skip
"""Tokens that end an assistant's turn in one family or another."""


HEADS = ("<|CHATBOT_TOKEN|>", "<｜Assistant｜>", "<|header_end|>\n\n", "[/INST]", "<#bot#>\n")
"""What stands before an assistant's words in templates whose generation prompt does not show it."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "Some tool.", "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    city={"type": "string", "description": "c"},
    code={"type": "string", "description": "d"},
    days={"type": "integer", "description": "e"},
    share={"type": "number", "description": "f"},
    hot={"type": "boolean", "description": "g"},
    since={"type": ["string", "null"], "description": "h"},
    where={"type": "object", "description": "i", "additionalProperties": True,
           "properties": {"lat": {"type": "array", "items": {"type": "number"}}, "tag": {"type": "string"},
                          "deep": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}},
    names={"type": "array", "description": "j", "items": {"type": "string"}},
)  # fmt: skip
TOOLS = [WEATHER, tool("now")]


def environment() -> SandboxedEnvironment:
    """As servers run templates, except that these may change their own lists, which some do."""
    made: Any = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = lambda value, ensure_ascii=False, **given: json.dumps(
        value, ensure_ascii=ensure_ascii, **given
    )
    made.globals["strftime_now"] = lambda format: datetime(2026, 1, 1).strftime(format)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made.globals["raise_exception"] = refuse
    return made


_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""Marks what an assistant wrote, for training on text; it has no effect here."""


def _as_if(tag: re.Match[str]) -> str:
    return tag[1] + ("endif" if tag[2] else "if true") + tag[3]


class Template:
    """A chat template and the format found for it."""

    def __init__(self, name: str) -> None:
        text = (DATA / name).read_text("utf-8")
        self.name = name
        self.format: Grammar = find(text)
        self._template = environment().from_string(_GENERATION.sub(_as_if, text))

    def _render(self, messages: list[dict[str, Any]], tools: bool, generate: bool) -> str:
        return self._template.render(
            messages=messages,
            tools=TOOLS[1:] if tools else None,
            add_generation_prompt=generate,
            bos_token="<BOS>",
            eos_token="<EOS>",
            functions="[]",
            datetime="today",
        )

    def said(self, content: str, calls: list[ParsedCall], reasoning: str = "") -> tuple[str, str] | None:
        """How the assistant's message stands in the template's text: its lead, and what the model would have said.
        None if the template refuses the message."""
        for text, tools in product((False, True), (True, False)):
            try:
                return self._said(content, calls, reasoning, text or self.format.name == "phi4-mini", tools)
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
                continue
        return None

    def _said(self, content: str, calls: list[ParsedCall], reasoning: str, text: bool, tools: bool) -> tuple[str, str]:
        user = {"role": "user", "content": USER}
        made = [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False) if text else call.arguments,
                },
            }
            for i, call in enumerate(calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if made:
            message["tool_calls"] = made
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        whole = self._render([user, message], tools, False)
        prompt = self._render([user], tools, True)
        begun = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
        asked = whole.rfind(USER) + len(USER)
        heads = [at + len(head) for head in HEADS if (at := whole.find(head, asked)) >= 0]
        begun = max(begun, min(heads, default=0))
        answer = whole[begun:]
        if self.format.name == "gigachat-3.0":  # calls are messages of their own, and the token between is not shown
            answer = answer.replace("<|message_sep|>", "", 1)
        ends = [at for end in ENDS if end not in self.format.marks and (at := answer.find(end)) >= 0]
        return whole[asked:begun], answer[: min(ends)] if ends else answer
