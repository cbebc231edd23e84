"""Prompts that are improved, in requests of agents that do not know of it.

    {"role": "system", "content": "<strop:system>You book rooms.</strop:system> Today is Monday."}
    {"role": "system", "content": "You book meeting rooms. Look at the size first. Today is Monday."}

What stands between the marks is replaced by the rollout's version of the prompt, and the marks go; where it has
placeholders, what is marked is the first version, filled in. Where
`prompts.NAME.find` is `text`, the words of the first version are as good as marks: an agent that holds that text is
changed in nothing. What it filled into placeholders of the first version is filled into those of the present one.

Only system prompts are looked at: messages of role system or developer, `system` of Anthropic's API and `instructions`
of OpenAI's Responses. The model sees, and the turn records, what was put there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from strop.config import PromptConfig
from strop.config.prompts import fill_placeholders
from strop.gateway.dialects.base import ApiError

_ROLES = ("system", "developer")
_MARKS = (b"<strop:", b"\\u003cstrop:", b"\\u003Cstrop:")
"""How a mark begins in JSON: some clients write < by its number."""
STARTS = 100
"""Places in a text at which the words of a prompt are looked for at most."""


class PromptMatch(NamedTuple):
    """Where a prompt stands in a text, and what was filled into its placeholders."""

    start: int
    end: int
    values: dict[str, str]


class PromptPattern:
    """What finds a version of a prompt with anything in the place of its placeholders; one that comes again has to say
    the same again. Words are looked for one after the other: time is linear, whatever an agent sends."""

    def __init__(self, text: str, placeholders: Sequence[str]) -> None:
        names = "|".join(rf"\{{{name}\}}" for name in placeholders) or r"(?!)"
        self._words = re.split(names, text.rstrip())
        self._names = [found[1:-1] for found in re.findall(names, text)]

    def find(self, text: str) -> PromptMatch | None:
        """The first place where it stands."""
        start = -1
        for _ in range(STARTS):
            start = text.find(self._words[0], start + 1)
            if start < 0:
                return None
            if (found := self._match(text, start)) is not None:
                return found
        return None

    def match(self, text: str) -> dict[str, str] | None:
        """What was filled in, where the text is this prompt and nothing else."""
        found = self._match(text, 0) if text.startswith(self._words[0]) else None
        return found.values if found is not None and found.end == len(text) else None

    def _match(self, text: str, start: int) -> PromptMatch | None:
        at, values = start + len(self._words[0]), dict[str, str]()
        for n, (name, word) in enumerate(zip(self._names, self._words[1:], strict=True)):
            last = n == len(self._names) - 1
            end = len(text) if last and not word else text.find(word, at)
            if end < 0 or values.setdefault(name, text[at:end]) != text[at:end]:
                return None
            at = end + len(word)
        return PromptMatch(start, at, values)


class PromptReplacer:
    """What finds and replaces the prompts of a configuration."""

    def __init__(self, prompts: Mapping[str, PromptConfig]) -> None:
        self._marks = {name: re.compile(rf"<strop:{name}>(.*?)</strop:{name}>", re.DOTALL) for name in prompts}
        self._placeholders = {name: prompt.list_placeholders() for name, prompt in prompts.items()}
        self._firsts = {name: PromptPattern(prompt.text, self._placeholders[name]) for name, prompt in prompts.items()}
        self._by_text = {name for name, prompt in prompts.items() if prompt.find == "text"}

    def replace(self, body: bytes, versions: Mapping[str, str]) -> bytes:
        """A request's body with the present versions in it. Where nothing is found it is the same, byte for byte."""
        if not versions or not (self._by_text or any(mark in body for mark in _MARKS)):
            return body
        try:
            request = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return body  # its API says what is wrong with it
        if not isinstance(request, dict):
            return body
        fields = cast("dict[str, Any]", request)
        found = False
        for holder, key in _find_system_prompts(fields):
            text = self._replace_in(holder[key], versions)
            found = found or text != holder[key]
            holder[key] = text
        return msgspec.json.encode(fields) if found else body

    def _replace_in(self, text: str, versions: Mapping[str, str]) -> str:
        for name, version in versions.items():
            if (mark := self._marks.get(name)) is not None:
                text = mark.sub(lambda found, name=name, version=version: self._fill(name, version, found[1]), text)
            first = self._firsts[name].find(text) if name in self._by_text else None
            if first is not None and not self._has(text, name, version):
                text = text[: first.start] + fill_placeholders(version, first.values) + text[first.end :]
        return text

    def _fill(self, name: str, version: str, marked: str) -> str:
        """The present version with what the agent filled into the first one. Raises `ApiError` where that cannot be
        told."""
        if not self._placeholders[name]:
            return version
        values = self._firsts[name].match(marked.strip())
        if values is None:
            raise ApiError(
                f"what is marked as the prompt {name} is not its first version, so that nobody knows what to fill into "
                f"{{{self._placeholders[name][0]}}} of another one. Fix: mark the very text of prompts.{name}.text, "
                "filled in, or leave its placeholders out",
                code="unsupported_value",
            )
        return fill_placeholders(version, values)

    def _has(self, text: str, name: str, version: str) -> bool:
        """Whether the agent has sent the present version itself: it may begin with the words of the first one."""
        return PromptPattern(version, self._placeholders[name]).find(text) is not None


def _find_system_prompts(request: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Where text of system prompts stands in a request: what holds it, and the key or the place in it."""
    found: list[tuple[Any, Any]] = []
    for key in ("system", "instructions"):
        found += _find_texts(request, key)
    for key in ("messages", "input"):
        items = request.get(key)
        for item in cast("list[Any]", items) if isinstance(items, list) else ():
            if isinstance(item, dict) and cast("dict[str, Any]", item).get("role") in _ROLES:
                found += _find_texts(cast("dict[str, Any]", item), "content")
    return found


def _find_texts(holder: dict[str, Any], key: str) -> list[tuple[Any, Any]]:
    """A text, or the texts of its parts."""
    value: Any = holder.get(key)
    if isinstance(value, str):
        return [(holder, key)]
    parts = cast("list[Any]", value) if isinstance(value, list) else []
    return [(part, "text") for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]  # pyright: ignore
