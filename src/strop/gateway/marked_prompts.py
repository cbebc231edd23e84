"""Prompts that are improved, in requests of agents that do not know of it.

    {"role": "system", "content": "<strop:system>You book rooms.</strop:system> Today is Monday."}
    {"role": "system", "content": "You book meeting rooms. Look at the size first. Today is Monday."}

What stands between the marks is replaced by the rollout's version of the prompt, and the marks go. Where
`prompts.NAME.find` is `text`, the words of the first version are as good as marks: an agent that holds that text is
changed in nothing. What it filled into placeholders of the first version is filled into those of the present one.

Only system prompts are looked at: messages of role system or developer, `system` of Anthropic's API and `instructions`
of OpenAI's Responses. The model sees, and the turn records, what was put there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import msgspec

from strop.config import PromptConfig
from strop.config.prompts import fill_placeholders

_ROLES = ("system", "developer")
_MARKS = (b"<strop:", b"\\u003cstrop:")
"""How a mark begins in JSON: some clients write < by its number."""


class PromptReplacer:
    """What finds and replaces the prompts of a configuration."""

    def __init__(self, prompts: Mapping[str, PromptConfig]) -> None:
        self._marks = {name: re.compile(rf"<strop:{name}>(.*?)</strop:{name}>", re.DOTALL) for name in prompts}
        self._placeholders = {name: prompt.list_placeholders() for name, prompt in prompts.items()}
        self._texts = {
            name: _compile(prompt.text, self._placeholders[name])
            for name, prompt in prompts.items()
            if prompt.find == "text"
        }

    def replace(self, body: bytes, versions: Mapping[str, str]) -> bytes:
        """A request's body with the present versions in it. Where nothing is found it is the same, byte for byte."""
        if not versions or not (self._texts or any(mark in body for mark in _MARKS)):
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
            text = self._put_in(holder[key], versions)
            found = found or text != holder[key]
            holder[key] = text
        return msgspec.json.encode(fields) if found else body

    def _put_in(self, text: str, versions: Mapping[str, str]) -> str:
        for name, version in versions.items():
            if (mark := self._marks.get(name)) is not None:
                text = mark.sub(lambda _, version=version: version, text)
            if (first := self._texts.get(name)) is not None and not self._has(text, name, version):
                text = first.sub(lambda found, version=version: fill_placeholders(version, found.groupdict()), text)
        return text

    def _has(self, text: str, name: str, version: str) -> bool:
        """Whether the agent has sent the present version itself: it may begin with the words of the first one."""
        return _compile(version, self._placeholders[name]).search(text) is not None


@lru_cache(maxsize=256)
def _compile(text: str, placeholders: tuple[str, ...]) -> re.Pattern[str]:
    """What matches a version, with anything in the place of its placeholders; one that comes again has to say the same
    again."""
    pattern, seen, at = "", set[str](), 0
    for found in re.finditer("|".join(rf"\{{{name}\}}" for name in placeholders) or r"(?!)", text):
        name = found[0][1:-1]
        pattern += re.escape(text[at : found.start()]) + (f"(?P={name})" if name in seen else f"(?P<{name}>.*?)")
        seen.add(name)
        at = found.end()
    rest = re.escape(text[at:].rstrip())
    return re.compile(pattern + (rest or r"\Z"), re.DOTALL)


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
