"""What every source of tasks gives: rows, by split."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast


class Row(NamedTuple):
    """One item of a source before it is a task. `place` is what an error says, `id` what it is called if the item
    brings no id of its own.

    >>> Row("qa.jsonl, line 3", "qa-3", {"question": "2 + 2?"}).id
    'qa-3'
    """

    place: str
    id: str
    item: Any


Rows = Iterator[Row]
Sources = dict[str | None, Rows]
"""Rows by split. Under None the rows say themselves which split they are of."""


def find_lone_surrogate(value: Any, path: str = "") -> str | None:
    """Where a text holds half a character, if any does: such text cannot be written as UTF-8.

    >>> find_lone_surrogate({"q": ["fine", "a\\ud800"]})
    "'q.1' holds \\\\ud800, half a character (a lone surrogate), as character 2: write the whole one, or leave it out"
    """
    if isinstance(value, str):
        found = re.search("[\ud800-\udfff]", value)
        if found is None:
            return None
        what = f"holds \\u{ord(found[0]):04x}, half a character (a lone surrogate), as character {found.start() + 1}"
        return f"{path or 'data'!r} {what}: write the whole one, or leave it out"
    if isinstance(value, Mapping):
        for name, inside in cast("Mapping[Any, Any]", value).items():
            wrong = find_lone_surrogate(name, "") if isinstance(name, str) else None
            if wrong:
                return f"the name {name!r} {wrong.partition(' ')[2]}"
            if wrong := find_lone_surrogate(inside, f"{path}.{name}" if path else str(name)):
                return wrong
    if isinstance(value, list | tuple):
        each = enumerate(cast("list[Any]", value))
        return next((wrong for n, inside in each if (wrong := find_lone_surrogate(inside, f"{path}.{n}"))), None)
    return None
