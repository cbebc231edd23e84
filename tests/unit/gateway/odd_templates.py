"""Chat templates of odd kinds, made from parts, which say themselves where an answer ends.

odd = Odd(end="later", ids="later")     ends a turn only once another message follows, and then gives calls ids
odd.source                              the template
odd.rest(messages, 1)                   what it truly writes behind the end of messages[1]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from strop.gateway.jinja import Template

SIGN = "\u2691"
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Odd:
    """`end`: when answers are ended: "always", "later" (once a message follows), "never". `mark` ends words, and calls
    unless `calls_mark` does; `space` stands before it. `ids`: when calls have an id behind their arguments. `shown`:
    "all" calls, the "first" one, or "numbered": with a mark of its own behind each but the first. `words` stand
    "before" the calls, "behind" them, or "later", behind their results. `thoughts` are those of the last answer, or
    "kept"."""

    end: str = "always"
    mark: str = "<end>"
    calls_mark: str | None = None
    space: str = ""
    ids: str = "never"
    shown: str = "all"
    words: str = "before"
    thoughts: str = "kept"

    @cached_property
    def source(self) -> str:
        return self._source.replace(SIGN, "")

    def rest(self, messages: list[Message], at: int) -> str:
        """What the template writes behind the end of an answer, up to where the next one begins."""
        answers = sum(message["role"] == "assistant" for message in messages[: at + 1])
        text = Template(self._source, {}).render(messages, None, generate=True)
        return "".join(text.split(SIGN)[answers:])

    def body(self, message: Message) -> str:
        """What a model says for an answer, without its end."""
        text = Template(self._source, {}).render([message], None, generate=False).partition(SIGN)[0]
        return text.removeprefix("<assistant>").removesuffix(self.ended(message) if self.end == "always" else "")

    def ended(self, message: Message) -> str:
        """How this answer is ended once a message follows."""
        mark = self._calls_mark if message.get("tool_calls") else self.mark
        return "" if self.end == "never" else self.space + mark

    @property
    def torn(self) -> bool:
        """Whether some of an answer with two calls and words is not written where it was said."""
        return self.shown == "first" or self.words == "later"

    @property
    def _calls_mark(self) -> str:
        return self.mark if self.calls_mark is None else self.calls_mark

    @cached_property
    def _source(self) -> str:
        later = "{% if not here.last %}…{% endif %}"
        when = {"always": "…", "later": later, "never": ""}
        mark = f"{{{{ {self.space!r} }}}}{{{{ {self._calls_mark!r} if m.tool_calls else {self.mark!r} }}}}"
        id = when[self.ids].replace("…", ', "id": "{{ c.id }}"')
        call = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}' + id + "}"
        call = f"<call>{call}</call>"
        if self.shown == "first":
            call = "{% if loop.first %}" + call + "{% endif %}"
        if self.shown == "numbered":
            call += "{% if not loop.first %}<another>{% endif %}"
        calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
        words = "{{ m.content or '' }}"
        if self.thoughts == "last":
            words = "{{ m.content if here.last else m.content.split('</think>')[-1] }}"
        body = {
            "before": words + calls,
            "behind": calls + words,
            "later": "{% if not m.tool_calls %}" + words + "{% endif %}" + calls,
        }[self.words]
        told = "{{ m.content }}<over>"
        if self.words == "later":
            told += "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].content }}{% endif %}"
        return (
            "{% for m in messages %}{% set here = loop %}<{{ m.role }}>{% if m.role == 'assistant' %}"
            + body + when[self.end].replace("…", mark) + SIGN
            + "{% else %}" + told + "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        )  # fmt: skip
