"""What a chat template is like: how it wants messages, how it closes an answer, which marks end a turn.

Nobody says so, so it is asked: small conversations with a mark in them are rendered, and the text around the mark is
looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from strop.gateway.dialects.base import Json
from strop.gateway.jinja import BadTemplate, Template

MARK, NEXT = "strop0mark", "strop1mark"
USER: Json = {"role": "user", "content": "a"}
TOOL: Json = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_MARKER = r"<[^<>\s]{1,40}>|<\|[^<>]{1,40}\|>|<｜[^<>]{1,40}｜>"


class Shape(Struct, frozen=True):
    """How a template wants assistant messages with calls: arguments as a table or as text, no content as None or as
    empty text, ids of nine letters and digits or any. `raw` is whether arguments that are no JSON object are shown as
    the text they are; otherwise that stands in a table of its own."""

    arguments: Literal["table", "text"] = "table"
    no_content: str | None = None
    short_ids: bool = False
    raw: bool = True

    def write(self, arguments: Json | str) -> Json | str:
        if isinstance(arguments, str):
            if self.raw:
                return arguments
            arguments = wrap(arguments)
        return json.dumps(arguments, ensure_ascii=False) if self.arguments == "text" else arguments


def wrap(arguments: Json | str) -> Json:
    """Arguments as a table."""
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


class Closing(Struct, frozen=True):
    """How a template closes an assistant's message: what still belongs to it, the marks that end the turn and, where
    there are none, the mark that the next message begins with, which the model says to end its turn. Unless that is
    `sure`, it may be an end of the turn after all."""

    before: str
    ends: tuple[str, ...]
    next: tuple[str, ...] = ()
    sure: bool = True


class TemplateStyle(Struct, frozen=True):
    """A template's ways. `said` and `called` are how it closes words and calls. `tools`, `calls`, `results` and
    `system` are whether tools that it is given, what was called, what came of it, and a system's message show up in
    what it writes; None if it refuses them."""

    shape: Shape
    generation_prompt: str
    said: Closing
    called: Closing
    tools: bool
    calls: bool | None = None
    results: bool | None = None
    system: bool = True


def find_style(template: Template, added: Iterable[str], kept: frozenset[str]) -> TemplateStyle:
    """`added` are the marks the tokenizer knows; `kept` those that have a meaning within an answer."""
    shape = TemplateProbe(template, Shape(), added, kept).shape()
    shape = replace(shape, raw=TemplateProbe(template, shape, added, kept).shows_text())
    probe = TemplateProbe(template, shape, added, kept)
    said = probe.closing(answer(MARK), {"role": "user", "content": NEXT})
    tool: Json = {"role": "tool", "content": NEXT, "name": "f", "tool_call_id": "call00001"}
    called = probe.closing(answer("", MARK), tool, said.ends)
    return TemplateStyle(
        shape,
        probe.generation_prompt(),
        said,
        called,
        tools=probe.tools(),
        calls=probe.shows([USER, answer("", MARK), tool | {"content": "b"}]),
        results=probe.shows([USER, answer("", "a"), tool | {"content": MARK}]),
        system=bool(probe.shows([{"role": "system", "content": MARK}, USER])),
    )


def shape_message(message: Json, shape: Shape) -> Json:
    """A plain message (see `ModelRequest`) as this template wants it."""
    if "turn" in message:  # which turn it was is between the agent and the gateway
        message = {key: value for key, value in message.items() if key != "turn"}
    if message["role"] == "tool":
        id = message.get("tool_call_id")
        return message | {"tool_call_id": _short(id)} if shape.short_ids and id else message
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed: list[Json] = []
    for call in calls:
        function = call["function"]
        function = function | {"arguments": shape.write(function["arguments"])}
        changed.append(call | {"function": function} | ({"id": _short(call["id"])} if shape.short_ids else {}))
    return message | {"tool_calls": changed, "content": message["content"] or shape.no_content}


def marker(added: Iterable[str]) -> re.Pattern[str]:
    """Finds marks: those the tokenizer knows, and what looks like one."""
    return re.compile("|".join([*map(re.escape, sorted(added, key=len, reverse=True)), _MARKER]))


class TemplateProbe:
    """Asks a template by rendering for it what it may never see again."""

    def __init__(self, template: Template, shape: Shape, added: Iterable[str], kept: frozenset[str]) -> None:
        self._template, self._shape, self._kept = template, shape, kept
        self._marker = marker(added)

    def shape(self) -> Shape:
        """The first shape in which the template shows a call's arguments; or does not refuse one at least."""
        tool = {"role": "tool", "tool_call_id": "call_0123456789", "name": "f", "content": "b"}
        called = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": {"a": MARK}}}
        chat = [USER, {"role": "assistant", "content": "", "tool_calls": [called]}, tool]
        fallback = None
        for short_ids in (False, True):
            for arguments in ("table", "text"):
                for no_content in (None, ""):
                    shape = Shape(arguments, no_content, short_ids)
                    try:
                        text = self._probe([shape_message(message, shape) for message in chat], True)
                    except BadTemplate:
                        continue
                    if MARK in text and "None" not in text:
                        return shape
                    if fallback is None or ("None" not in text and fallback.no_content is None):
                        fallback = shape
        return fallback or Shape()

    def shows_text(self) -> bool:
        """Whether arguments that are no JSON object are shown as they are."""
        tool = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "b"}
        called = answer("", "a")
        called["tool_calls"][0]["function"]["arguments"] = MARK
        return bool(self.shows([USER, called, tool]))

    def generation_prompt(self) -> str:
        try:
            return self._probe([USER], True).removeprefix(self._probe([USER], False))
        except BadTemplate:
            return ""

    def tools(self) -> bool:
        """Whether the template writes a tool's name or what it does, with a system's message or without."""
        about = TOOL["function"] | {
            "name": MARK,
            "description": MARK,
            "parameters": {"type": "object", "properties": {}},
        }
        for head in ([], [{"role": "system", "content": "s"}]):
            try:
                if MARK in self._template.render([*head, USER], [TOOL | {"function": about}], generate=True):
                    return True
            except BadTemplate:
                continue
        return False

    def shows(self, messages: Sequence[Json]) -> bool | None:
        """Whether the mark in these messages is in what the template writes; None if it refuses them."""
        found = None
        for tools in ([TOOL], None):
            try:
                text = self._template.render([shape_message(m, self._shape) for m in messages], tools, generate=True)
            except BadTemplate:
                continue
            found = found or MARK in text
        return found

    def closing(self, answered: Json, following: Json, known: Sequence[str] = ()) -> Closing:
        """How the template closes an assistant's message that ends with the mark: compared are the end of a
        conversation and one that goes on, since some templates add more at the end, and some write nothing. `known`
        marks end other messages."""
        alone = self._render_after_mark([answered])
        within = self._render_after_mark([answered, following]).partition(NEXT)[0]
        if ended := [end for end in known if end in within]:
            return Closing("", tuple(ended))
        syntax = self._syntax(answered) if answered.get("tool_calls") else set[str]()
        if alone and (within.startswith(alone) or not within):
            marks = [mark for mark in self._marks(alone) if mark not in syntax and alone.endswith(mark)]
            if not marks and not answered.get("tool_calls") and len(alone) < 16:
                marks = [alone]
            if marks:
                return Closing(alone.removesuffix(marks[0]).rstrip(), (marks[0],))
            later = self._ended_later(answered, following, within, syntax)
            return later or Closing(alone, (), self._next(within[len(alone) :]), sure=False)
        common = next((i for i, (a, b) in enumerate(zip(alone, within, strict=False)) if a != b), 0)
        marks = [mark for mark in self._marks(within[:common]) if mark not in syntax]
        marks = [mark for mark in marks if mark not in self._kept] or marks  # after those a model goes on
        if marks:
            return Closing(within.partition(marks[0])[0].rstrip(), (marks[0],))
        if not alone or syntax:
            later = self._ended_later(answered, following, within, syntax)
            return later or Closing("", (), self._next(within), sure=False)
        return Closing("", tuple(dict.fromkeys([*self._next(within), *self._next(alone)])))

    def _ended_later(self, answered: Json, following: Json, within: str, syntax: set[str]) -> Closing | None:
        """How messages are closed by a template that ends them only once another one follows: what stands between them
        and does not belong to the latter. What that begins with is seen where it follows no answer: unless another
        message that ends alike stands before it there."""
        lead = [USER] if answered.get("tool_calls") else []
        try:
            head = self._probe([*lead, shape_message(following, self._shape)], False).partition(NEXT)[0]
        except BadTemplate:
            return None
        pairs = zip(within[::-1], head[::-1], strict=False)
        cut = len(within) - next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(within), len(head)))
        cut = next((mark.end() for mark in self._marker.finditer(within) if mark.start() < cut < mark.end()), cut)
        if not cut and len(self._marks(within)) > 1:
            return None
        ending = within[:cut].rstrip()
        marks = [mark for mark in self._marks(ending) if mark not in syntax and ending.endswith(mark)]
        if marks:
            return Closing(ending.removesuffix(marks[0]).rstrip(), (marks[0],))
        if not answered.get("tool_calls") and re.fullmatch(r"\W{1,15}", ending):
            return Closing("", (ending,))
        return Closing(ending if answered.get("tool_calls") else "", (), self._next(within[cut:]))

    def _render_after_mark(self, messages: list[Json]) -> str:
        try:
            text = self._probe([USER, *(shape_message(message, self._shape) for message in messages)], False)
        except BadTemplate:
            return ""
        return text.partition(MARK)[2].rstrip() if MARK in text else ""

    def _next(self, text: str) -> tuple[str, ...]:
        """The mark a text begins with; one that the tokenizer does not know may be short."""
        text = text.lstrip()
        marks = self._marks(text)
        return (marks[0],) if marks and text.startswith(marks[0]) else ()

    def _syntax(self, called: Json) -> set[str]:
        """Marks that belong to calls: those between two of them, and those that close what was opened before."""
        found: set[str] = set()
        for message in (called, answer("", MARK, NEXT)):
            try:
                text = self._probe([USER, shape_message(message, self._shape)], False)
            except BadTemplate:
                continue
            before, _, after = text.partition(MARK)
            if NEXT in after:
                found.update(self._marks(after.partition(NEXT)[0]))
            opened = self._marks(before)
            found.update(mark for mark in self._marks(after) if mark[:2] == "</" and "<" + mark[2:] in opened)
        return found

    def _marks(self, text: str) -> list[str]:
        return self._marker.findall(text)

    def _probe(self, messages: Sequence[Json], generate: bool) -> str:
        """A conversation without tools; with one, if the template demands it."""
        try:
            return self._template.render(messages, None, generate=generate)
        except BadTemplate:
            return self._template.render(messages, [TOOL], generate=generate)


def answer(content: str, *calls: str) -> Json:
    """An assistant's message with calls that have these arguments."""
    function = [{"name": "f", "arguments": {"a": argument}} for argument in calls]
    made = [{"id": f"call0000{i}", "type": "function", "function": f} for i, f in enumerate(function, 1)]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def _short(id: str) -> str:
    """
    >>> _short("abc123XYZ"), len(_short("call_0123456789"))
    ('abc123XYZ', 9)
    """
    return id if re.fullmatch("[A-Za-z0-9]{9}", id) else blake2b(id.encode(), digest_size=5).hexdigest()[:9]
