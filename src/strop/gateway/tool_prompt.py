"""Tools for chat templates that leave them out: what a template does not write stands in the messages it is given.

    <tools> ... </tools>                    what there is, and how to call it, after the system's words
    <tool_call> ... </tool_call>            a call, as the model wrote it
    <tool_response> ... </tool_response>    what came of it, as a user's message

The template is rendered as any other then, so prompts are made, continued and checked in the one way there is. Where a
template writes calls and results and leaves out only the tools (DeepSeek's do), the model is shown its family's own
form of a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from strop.gateway.dialects.base import Json
from strop.gateway.jinja import BadTemplate, Template
from strop.gateway.template_style import TOOL, USER, TemplateStyle, shape_message, wrap
from strop.gateway.tool_calls import PLAIN, hermes_like
from strop.gateway.tool_calls.base import ParsedCall
from strop.gateway.tool_calls.reader import Grammar

Tools = Sequence[Json] | None
ToolsWay = Literal["auto", "template", "system"]
"""Who writes tools: the built-in way where the template cannot, the template alone, or the built-in way always."""

_NAME, _ARGUMENTS = "name_of_the_function", {"name_of_an_argument": "its value"}
_HERMES = f'<tool_call>\n{{"name": "{_NAME}", "arguments": {json.dumps(_ARGUMENTS)}}}\n</tool_call>'


class ToolWriter(Struct, frozen=True):
    """Writes into the messages what a template leaves out: `tools` with the `form` of a call, `calls` in this format,
    `results`. `system` is whether the template writes a system's message; the first user's takes the tools
    otherwise."""

    tools: bool
    calls: Grammar | None
    results: bool
    system: bool
    form: str = _HERMES

    def __call__(self, messages: Sequence[Json], tools: Tools) -> tuple[list[Json], Tools]:
        shown: list[Json] = []
        answering = False  # the last message has results, to which a user's words are added: many want roles in turn
        for message in messages:
            if self.results and message["role"] == "tool":
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                self._add(shown, text, answering)
                answering = True
            elif answering and message["role"] == "user":
                self._add(shown, message["content"], answering)
                answering = False
            else:
                shown.append(_in_words(message, self.calls) if self.calls and message.get("tool_calls") else message)
                answering = False
        if not self.tools:
            return shown, tools
        return self._add_tools(shown, tools) if tools else shown, None

    def _add(self, shown: list[Json], text: str, answering: bool) -> None:
        if answering:
            shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n{text}"}
        else:
            shown.append({"role": "user", "content": text})

    def _add_tools(self, messages: list[Json], tools: Sequence[Json]) -> list[Json]:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        about = (
            "# Tools\n\nYou may call functions. Each of them is described on a line of its own:\n"
            f"<tools>\n{listed}\n</tools>\n\n"
            f"To call a function, answer in this form, once for every call:\n{self.form}"
        )
        role = "system" if self.system else "user"
        first = messages[:1] if self.system else messages
        at = next((i for i, message in enumerate(first) if message["role"] == role), None)
        if at is None:
            return [{"role": role, "content": about}, *messages]
        words = messages[at]["content"]
        both = (words, about) if self.system else (about, words)
        changed = messages[at] | {"content": "\n\n".join(text for text in both if text)}
        return [*messages[:at], changed, *messages[at + 1 :]]


def _in_words(message: Json, format: Grammar) -> Json:
    """An assistant's message with its calls as text: in the family's form or, where that is not known, in Hermes'."""
    calls: list[str] = []
    for call in message["tool_calls"]:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        hermes = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}'
        own = None if format.name == "hermes" else format.written(name, wrap(arguments))
        calls.append(own or f"<tool_call>\n{hermes}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}


class Tooling(Struct, frozen=True):
    """How a model is told about tools: who writes what the template leaves out (`writer`), in which `format` calls are
    read, and what is to be said about it: a `note` for the person who trains, and a refusal (`lost`) where tools would
    reach nobody."""

    writer: ToolWriter | None
    format: Grammar
    note: str = ""
    lost: str = ""


def choose_tooling(template: Template, style: TemplateStyle, format: Grammar, way: ToolsWay) -> Tooling:
    """What must be done for a template to show a model its tools, what it called, and what came of it. A template that
    refuses calls or results says so itself."""
    calls, results = style.calls is not False, style.results is not False
    whole = style.tools and calls and results
    if way == "template" or (whole and way == "auto"):
        return Tooling(None, format, _explain_unread(style, format), "" if whole else _explain_lost(style))
    if style.tools and way == "auto" and format.name != PLAIN.name:
        note = f"the chat template leaves out {_list_dropped(style)}: they are written into the messages it is given"
        return Tooling(ToolWriter(False, None if calls else format, not results, style.system), format, note)
    form = _form(template, style, format) if way == "auto" and style.calls and style.results else None
    where = "the system prompt" if style.system else "the first user's message"
    why = "policy.tools is system" if way == "system" else f"the chat template leaves out {_list_dropped(style)}"
    if form is not None:
        note = f"{why}: tools are written into {where}, with calls in the template's own form ({format.name})"
        return Tooling(ToolWriter(True, None, False, style.system, form), format, note)
    note = (
        f"{why}: tools are written into {where}, with calls as <tool_call>{{...}}</tool_call>. For another form set "
        "policy.template to a template that knows tools"
    )
    hermes = hermes_like(format)
    return Tooling(ToolWriter(True, hermes, True, style.system), hermes, note)


def _list_dropped(style: TemplateStyle) -> str:
    said = {"tools": style.tools, "calls": style.calls, "results of tools": style.results}
    dropped = [what for what, shown in said.items() if shown is False]
    return " and ".join(filter(None, [", ".join(dropped[:-1]), *dropped[-1:]]))


def _explain_lost(style: TemplateStyle) -> str:
    return (
        f"this model's chat template leaves out {_list_dropped(style)}, and policy.tools is template. Fix: set "
        "policy.tools to auto, or policy.template to a template that knows tools"
    )


def _explain_unread(style: TemplateStyle, format: Grammar) -> str:
    if format.name != PLAIN.name or not style.tools:
        return ""
    return (
        "the chat template shows the model its tools, but nothing here reads the calls of its family: they come back "
        "as text. Fix: set policy.tools to system, or policy.template to a template of a known family"
    )


def _form(template: Template, style: TemplateStyle, format: Grammar) -> str | None:
    """A call as the template itself writes it, if it reads as one."""
    head = format.begin_call(_NAME)
    if head is None:
        return None
    call: Json = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    message: Json = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = template.render([USER, shape_message(message, style.shape)], None, generate=False)
    except BadTemplate:
        return None
    at = text.find(head.strip())
    ends = [end for mark in style.said.ends if (end := text.find(mark, max(at, 0))) >= 0]
    form = text[max(at, 0) : min(ends, default=len(text))].strip()
    parser = format.parser([TOOL], calls=True, lead="")
    return form if parser.feed(form) + parser.close() == [ParsedCall(_NAME, _ARGUMENTS)] else None
