"""Where the data of a task has the text that an agent is given."""

from __future__ import annotations

from typing import Any, cast

FIELDS = ("question", "prompt", "input", "instruction", "problem", "query", "task", "text")
"""What tasks call it, in the order they are looked for."""
ANSWERS = {"answer", "answers", "golden", "gold", "solution", "target", "label", "expected", "output", "result"}
"""What they call something else: that is not what an agent is given, even where it is the only text."""


def text_fields(data: Any) -> list[str]:
    """The fields that are clearly it, best first: those with a known name, or the only text there is.

    >>> text_fields({"question": "3 * 4?", "answer": "12"}), text_fields({"id": 7, "story": "..."}), text_fields([1])
    (['question'], ['story'], [])
    >>> text_fields({"messages": [], "answer": "12"})
    []
    """
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    texts = [name for name, value in fields.items() if isinstance(value, str) and name.lower() not in ANSWERS]
    return [name for name in FIELDS if name in texts] or (texts if len(texts) == 1 else [])
