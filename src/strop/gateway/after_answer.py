"""What a chat template writes after an answer, up to where the next answer begins.

    <|im_start|>assistant\\nIt is 12.<|im_end|>\\n<|im_start|>user\\nAnd 5 * 6?<|im_end|>\\n<|im_start|>assistant\\n
                             last word ▲└──────────────────────────── this ────────────────────────────────┘

Nobody says where an answer ends in what a template writes: the conversation is rendered with a mark at the end of the
answer, and what follows the mark is checked.

Few templates depend there on what lies between the last user's message and the answer (those that number rounds or
calls do): a long conversation is rendered without it. Whether that may be done is tried out when the template is
loaded, on every kind of short conversation, and whenever one has grown to twice its length.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from strop.gateway.dialects.base import Json
from strop.gateway.dialects.fields import read_arguments
from strop.gateway.jinja import BadTemplate, Template
from strop.gateway.template_style import TOOL, USER, TemplateStyle, answer, shape_message

Messages = Sequence[Json]
Tools = Sequence[Json] | None

_HERE = "strop" + secrets.token_hex(8)
"""Marks a place in somebody's conversation, where no text may happen to be the same."""


class AfterAnswer:
    """Finds it for one template, with its variables as they are."""

    def __init__(self, template: Template, style: TemplateStyle) -> None:
        self._template, self._style = template, style
        self.ends = list(dict.fromkeys([*style.said.ends, *style.called.ends]))
        self._closes: dict[Any, bool] = {}  # kinds of conversations that were checked -> whether calls are shown
        self._short = self._may_be_shortened()
        self._tried: set[tuple[Any, ...]] = set()  # kinds of short conversations for which that was seen to be so

    def _write(self, messages: Messages, tools: Tools, generate: bool) -> str:
        return self._template.render(messages, tools, generate=generate)

    def _shape(self, messages: Messages) -> list[Json]:
        return [shape_message(message, self._style.shape) for message in messages]

    def find(self, messages: Messages, tools: Tools, served: int) -> tuple[str, str] | None:
        """What is written after the last word of the assistant's message `messages[served - 1]`: what still belongs to
        that turn, and what follows from the end of the turn to where the next answer begins. None if the template does
        not show where that message ends."""
        short = _shorten(messages, served) if self._short else None
        if short is None:
            return self._find(messages, served, tools)
        parts = self._find(*short, tools)
        kind = _kind(messages, tools) if len(messages) <= 8 else None
        if kind in self._tried or (kind is None and len(messages).bit_length() == (served - 1).bit_length()):
            return parts
        whole = self._find(messages, served, tools)
        self._short = parts == whole
        if kind and self._short:
            self._tried.add(kind)
        return whole

    def _find(self, messages: Messages, served: int, tools: Tools) -> tuple[str, str] | None:
        return self._find_after_mark(self._shape(messages), tools, served)

    def _find_after_mark(self, shaped: list[Json], tools: Tools, served: int) -> tuple[str, str] | None:
        """The conversation is rendered with a mark at the end of the message, in its last call if calls are shown. What
        is after the mark is checked once for every kind of conversation."""
        answer, kind = shaped[served - 1], _checked_as(shaped, tools, served)
        closes = self._closes.get(kind)
        known = closes is not None
        if closes is None:
            closes = bool(answer.get("tool_calls")) and self._shows_calls(shaped, tools, served)
        marked = _mark_call(answer) if closes else _mark_words(_without_calls(answer))
        rest = self._rest(shaped, tools, served, marked)
        closing = None if rest is None else self._find_closing(closes, rest, [*shaped[: served - 1], marked], tools)
        if rest is None or closing is None:
            return None
        rest = rest[len(closing) :]
        if not known:
            if not self._is_after(shaped, tools, served, rest, closes):
                return None
            if kind is not None:
                self._closes[kind] = closes
        return closing, rest

    def _shows_calls(self, shaped: list[Json], tools: Tools, served: int) -> bool:
        without = [*shaped[: served - 1], _without_calls(shaped[served - 1]), *shaped[served:]]
        try:
            return self._write(without, tools, True) != self._write(shaped, tools, True)
        except BadTemplate:
            return True

    def _is_after(self, shaped: list[Json], tools: Tools, served: int, rest: str, closes: bool) -> bool:
        """Whether a text is what the template writes after all of a message: it may write other text because of a
        mark, show only some of the calls, or write them or the words after what follows."""
        if not self._write(shaped, tools, True).endswith(rest):
            return False
        answer = shaped[served - 1]
        words = self._rest(shaped, tools, served, _mark_words(answer)) if closes and answer["content"] else None
        return words is None or words.endswith(rest)

    def _rest(self, shaped: list[Json], tools: Tools, served: int, marked: Json) -> str | None:
        """What stands after the mark; None if it is not shown."""
        try:
            text = self._write([*shaped[: served - 1], marked, *shaped[served:]], tools, True)
        except BadTemplate:
            return None
        found = text.rpartition(_HERE)
        return found[2] if found[1] else None

    def _find_closing(self, calls: bool, rest: str, marked: list[Json], tools: Tools) -> str | None:
        """What still belongs to the answer after a mark in it, before the end of the turn. It is what the template
        always writes there or, should it be something else this time, what it writes when nothing follows."""
        closing = self._style.called if calls else self._style.said
        if calls and (ends := [at for end in closing.ends if (at := rest.find(end)) >= 0]):
            return rest[: min(ends)].rstrip()
        if rest.startswith(closing.before) and (closing.before or not calls):
            return closing.before
        try:
            alone = self._write(marked, tools, False).rpartition(_HERE)[2].rstrip()
        except BadTemplate:
            return None
        end = next((end for end in self.ends if alone.endswith(end)), "")
        alone = alone[: len(alone) - len(end)].rstrip() if end else alone
        return alone if rest.startswith(alone) else None

    def _may_be_shortened(self) -> bool:
        """Try it on rounds of calls and of words, with a system's message and tools and without: templates look back
        by counting messages, and some count wrong."""
        call, result = answer("", "b"), {"role": "tool", "content": "c", "name": "f", "tool_call_id": "call00001"}
        chat = [USER, call, result, call, result, answer("d"), USER, answer("e"), USER, call, result, call, result]
        try:
            for head, tools in (([], None), ([{"role": "system", "content": "s"}], None), ([], [TOOL])):
                whole = [*head, *chat]
                for served in range(len(head) + 4, len(whole), 2):
                    for end in (served + 1, len(whole)):
                        short = _shorten(whole[:end], served)
                        if short and self._find(*short, tools) != self._find(whole[:end], served, tools):
                            return False
        except BadTemplate:
            return False
        return True


def _mark_call(answer: Json) -> Json:
    """An assistant's message with a mark at the end of its last call's arguments."""
    *calls, last = answer["tool_calls"]
    function = last["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        table = read_arguments(arguments)
        marked = arguments + _HERE if isinstance(table, str) else json.dumps(table | {_HERE: _HERE}, ensure_ascii=False)
    else:
        marked = arguments | {_HERE: _HERE}
    return answer | {"tool_calls": [*calls, last | {"function": function | {"arguments": marked}}]}


def _mark_words(answer: Json) -> Json:
    return answer | {"content": (answer["content"] or "") + _HERE}


def _without_calls(answer: Json) -> Json:
    return {name: value for name, value in answer.items() if name != "tool_calls"}


def _kind(messages: Messages, tools: Tools) -> tuple[Any, ...]:
    """What kind of conversation this is to a template: who speaks, with words and calls or without, with tools."""
    return (bool(tools), *((m["role"], bool(m["content"]), len(m.get("tool_calls", ()))) for m in messages))


def _checked_as(messages: Messages, tools: Tools, served: int) -> tuple[Any, ...] | None:
    """Conversations that a template treats alike where an answer ends; None if that hangs on the answer's very words:
    templates ask whether there are any, strip white space and look for marks at their end."""
    answer = messages[served - 1]
    content, calls = answer["content"] or "", answer.get("tool_calls")
    if len(messages) > 8 or (not calls and (not content or content[-1].isspace() or content[-1] in ">]")):
        return None
    thinks = "</" in content or bool(answer.get("reasoning_content"))
    return served, thinks, bool(calls and calls[-1]["function"]["arguments"]), *_kind(messages, tools)


def _shorten(messages: Messages, served: int) -> tuple[list[Json], int] | None:
    """A conversation without what lies between its system message, the last user's before an answer, and the answer;
    and how many messages that then ends. None if nothing can be left out."""
    user = next((i for i in range(served - 2, -1, -1) if messages[i]["role"] == "user"), None)
    system = [messages[0]] if messages[0]["role"] == "system" else []
    if user is None or user == len(system) == served - 2:
        return None
    return [*system, messages[user], *messages[served - 1 :]], len(system) + 2
