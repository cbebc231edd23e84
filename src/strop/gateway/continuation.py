"""Seams: where what the model said meets what the template writes after it. Are they right?

    <|im_start|>assistant\\n  It is 12.<|im_end|>        \\n<|im_start|>user\\nAnd 5 * 6?<|im_end|>\\n...
                                      └── said ──┘└─── new ───
                                      └── written: what the template itself has after the answer's last word

A seam is right if `said + new` is `written`. A model may end its turn otherwise than the template writes it, and a
template may write an answer otherwise once the conversation goes on: such differences have names. What has none is
wrong. Nothing here asks the renderer where an answer ends: the last word is found by changing it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from msgspec import Struct

from strop.gateway.dialects.base import Json
from strop.gateway.jinja import BadTemplate
from strop.gateway.template import Messages, Renderer, Tools
from strop.gateway.template_style import wrap

_WORD, _NUMBER = "qzseamqz", 90706050403
MARK = re.compile(r"\s*(<[^<>\s]{1,40}>|<\|[^<>]{1,40}\|>|\[/?[A-Z_]{1,20}\])")
_LAST_MARK = re.compile(MARK.pattern + r"\Z")

SPACE = "white space"
THINKING = "thinking left out of history"
MOVED = "parts moved, the system's or the tools"
CALLS = "calls written otherwise once answered"
HISTORY = "history written otherwise"
END = "another end of turn than the template writes"
NO_END = "an end of turn where the template writes none"
CUT = "cut off in the middle of an end"
HIDDEN = "an answer that the template does not show"


class Seam(Struct, frozen=True, kw_only=True):
    """`end` is the end of turn that the model said, the last part of `said`, with what its last token says beyond it;
    empty if it was cut off. `then` is what the template wrote after the last word, up to its end, when the answer was
    the last message. `ends` is whether the template writes an end here at all; `known` are all that may end a
    turn."""

    said: str
    end: str
    new: str
    written: str
    then: str
    ends: bool
    known: tuple[str, ...]

    def judge(self) -> tuple[tuple[str, ...], str | None]:
        """The names of allowed differences, and what is wrong in words."""
        if self.said + self.new == self.written:
            return (), None
        said, new, written = map(_shorten, (self.said, self.new, self.written))
        wrong = f"after the answer stands {said} + {new}; the template writes {written}"
        if not self.written.endswith(self.new):
            return (), wrong
        theirs = self.written[: len(self.written) - len(self.new)]
        names = self._judge_ended(theirs) if self.end else self._judge_unended(theirs)
        return (names, None) if names else ((), wrong)

    def _judge_unended(self, theirs: str) -> tuple[str, ...]:
        """The model was cut off, so `new` begins with the end of the turn."""
        if _same(self.said, theirs) and _space(theirs) <= _space(self.said):
            return (SPACE,)
        piece = self.said.removeprefix(theirs).strip()
        if self.said.startswith(theirs) and piece and any(end.startswith(piece) for end in self.known):
            return (CUT,)
        first, space = self._first_end(), len(self.new) - len(self.new.lstrip())
        if first is not None and first < len(theirs) and self.said.endswith(piece := theirs[first:]):
            return (CALLS, CUT) if _same(self.said.removesuffix(piece), self.then) else ()
        return (CALLS,) if first == len(theirs) + space and _same(self.said, self.then) else ()

    def _judge_ended(self, theirs: str) -> tuple[str, ...]:
        """The model ended its turn: so has the template, in the same place."""
        ours = self.said[: len(self.said) - len(self.end)]
        if theirs.endswith(self.end) and self.written.find(self.end) == len(theirs) - len(self.end):
            before = theirs[: len(theirs) - len(self.end)]
            return () if before == ours else (SPACE if _same(before, ours) else CALLS,)
        if _same(theirs, ours) and _space(theirs) <= _space(ours):
            doubled = self.known if self.ends else (self.end,)
            return () if self.new.lstrip().startswith(doubled) else (NO_END,)
        for end in self.known:
            if theirs.endswith(end) and self._first_end() == len(theirs) - len(end):
                return (END,) if _same(theirs.removesuffix(end), ours) else (END, CALLS)
        mark = _LAST_MARK.search(theirs)
        return (END,) if mark and _same(theirs[: mark.start()], ours) else ()

    def _first_end(self) -> int | None:
        """Where the template ends the turn, if that is an end that is known for one."""
        return min((at for end in self.known if end and (at := self.written.find(end)) >= 0), default=None)


def explain_rewrite(before: str, now: str, renderer: Renderer) -> str | None:
    """Why a template's text for the same messages is another now."""
    if before == now:
        return None
    if _same(before, now):
        return SPACE
    if _same(_thoughtless(before, renderer), _thoughtless(now, renderer)):
        return THINKING
    if sorted(re.findall(r"\S", before)) == sorted(re.findall(r"\S", now)):
        return MOVED
    return HISTORY


def find_after(renderer: Renderer, messages: Messages, tools: Tools, at: int, *, generate: bool) -> str | None:
    """What the template writes after the last word of the assistant's message `messages[at]`; None if it does not show
    that. A word is changed, and what follows must not."""
    whole = renderer.text(messages, tools, generate=generate)
    for mark, marked in _mark(messages[at]):
        try:
            text = renderer.text([*messages[:at], marked, *messages[at + 1 :]], tools, generate=generate)
        except BadTemplate:
            continue
        found, _, rest = text.partition(mark)
        if found != text and whole.endswith(rest := rest.replace(mark, "")):
            return rest
    if messages[at].get("tool_calls"):  # perhaps the template shows no calls
        plain = {name: value for name, value in messages[at].items() if name != "tool_calls"}
        without = [*messages[:at], plain, *messages[at + 1 :]]
        if _render(renderer, without, tools, generate) == whole:
            return find_after(renderer, without, tools, at, generate=generate)
    return None


def _render(renderer: Renderer, messages: Messages, tools: Tools, generate: bool) -> str | None:
    try:
        return renderer.text(messages, tools, generate=generate)
    except BadTemplate:
        return None


def _mark(answer: Json) -> Iterator[tuple[str, Json]]:
    """An answer with another last word, and that word: in its last call, or else in its text. Some arguments are not
    shown, those that are null say: then it is in one before them, or in the call's name."""
    if calls := answer.get("tool_calls"):
        function = calls[-1]["function"]
        arguments = wrap(function["arguments"])
        changed = [
            (mark, {"arguments": arguments | {name: _change(arguments[name], mark)}})
            for name in reversed(arguments)
            for mark in (_WORD, _NUMBER)
        ]
        for mark, change in [*changed, (_WORD, {"name": function["name"] + _WORD})]:
            yield str(mark), answer | {"tool_calls": [*calls[:-1], calls[-1] | {"function": function | change}]}
    else:
        content = answer["content"] or ""
        end = len(content.rstrip())
        yield _WORD, answer | {"content": content[:end] + _WORD + content[end:]}


def _change(value: Any, mark: str | int) -> Any:
    """JSON with a mark in its last leaf."""
    if isinstance(value, dict) and value:
        table = cast(Json, value)
        last = [*table][-1]
        return table | {last: _change(table[last], mark)}
    if isinstance(value, list) and value:
        items = cast(list[Any], value)
        return [*items[:-1], _change(items[-1], mark)]
    return f"{value}{mark}" if isinstance(value, str) else mark


def _thoughtless(text: str, renderer: Renderer) -> str:
    for open, close in renderer.format.thoughts:
        text = re.sub(rf"{re.escape(open)}.*?{re.escape(close)}", "", text, flags=re.DOTALL)
    return text


def _same(a: str, b: str) -> bool:
    """But for white space."""
    return "".join(a.split()) == "".join(b.split())


def _space(text: str) -> int:
    """How much white space a text ends with."""
    return len(text) - len(text.rstrip())


def _shorten(text: str, most: int = 160) -> str:
    return repr(text if len(text) <= most else text[:most] + "…")
