"""What every source of tasks gives: rows, by split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


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
