"""Prompts by name: texts that agents are given, and that a prompt optimiser improves.

    [prompts.system]
    text = "You book meeting rooms. Today is {date}."

An agent takes `llm.prompts["system"]`, or fills its placeholders with `llm.prompt("system", date=...)`. One that is not
to be changed sends its own system prompt, and the gateway puts the present version in the place of what is marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from msgspec import Struct

from strop.config.describe import doc
from strop.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class PromptConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text that agents are given by name; a prompt optimiser (algorithm.name = gepa or apo) improves it."""

    text: Annotated[str, doc("the first version")] = ""
    file: Annotated[str, doc("the file that holds the first version, instead of `text`")] = ""
    placeholders: Annotated[
        tuple[str, ...] | None,
        doc("names that stand in braces in every version, for the agent to fill; default: those of the first version"),
    ] = None
    find: Annotated[
        Literal["mark", "text"],
        doc(
            "how the gateway finds it in system prompts of agents that do not ask for it: between <strop:NAME> and "
            "</strop:NAME> (mark), or by the words of its first version too (text)"
        ),
    ] = "mark"

    def list_placeholders(self) -> tuple[str, ...]:
        """Those that every version has to have."""
        return find_placeholders(self.text) if self.placeholders is None else self.placeholders


def find_placeholders(text: str) -> tuple[str, ...]:
    """The names in braces, each once.

    >>> find_placeholders("Today is {date}, {user}. {date} again; {not one} nor {0}.")
    ('date', 'user')
    """
    return tuple(dict.fromkeys(_PLACEHOLDER.findall(text)))


def fill_placeholders(text: str, values: Mapping[str, object]) -> str:
    """The text with values in the place of these names in braces, and nothing else changed.

    >>> fill_placeholders('Today is {date}: answer {"room": ...}', {"date": "Monday"})
    'Today is Monday: answer {"room": ...}'
    """
    return _PLACEHOLDER.sub(lambda found: str(values[found[1]]) if found[1] in values else found[0], text)


def refuse_prompts(prompts: Mapping[str, PromptConfig], policies: Iterable[str] = ()) -> None:
    """Raises `ConfigError` for a prompt that nobody could use, or that is called as one of the `policies` is."""
    for name, prompt in prompts.items():
        if name in policies:
            raise ConfigError(f"prompts.{name} has the name of a policy. Fix: call it something else")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a prompt is called {name!r}. Fix: use letters, digits, '_' and '-', 64 at most")
        if bool(prompt.text.strip()) == bool(prompt.file):
            found = "both are set" if prompt.file else "neither is set"
            raise ConfigError(f"prompts.{name} has its first version in `text` or in `file`, and {found}. Fix: set one")
        if prompt.text and (missing := find_missing(prompt.text, prompt.list_placeholders())):
            raise ConfigError(
                f"prompts.{name}.text does not have its placeholder {{{missing[0]}}}. Fix: write it where the agent is "
                f"to fill it in, or leave it out of prompts.{name}.placeholders"
            )


def find_missing(text: str, placeholders: Iterable[str]) -> list[str]:
    """The placeholders that a text does not have."""
    there = find_placeholders(text)
    return [name for name in placeholders if name not in there]
