"""Where the data of a task has the text that an agent is given."""

from __future__ import annotations

from typing import Any, cast

FIELDS = ("question", "prompt", "input", "instruction", "problem", "query", "task", "text")
"""What tasks call it, in the order they are looked for."""


def text_fields(data: Any) -> list[str]:
    """The fields that are clearly it, best first: those with a known name, or the only text there is.

    >>> text_fields({"question": "3 * 4?", "answer": "12"}), text_fields({"id": 7, "story": "..."}), text_fields([1])
    (['question'], ['story'], [])
    """
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    return [name for name in FIELDS if name in texts] or (texts if len(texts) == 1 else [])
