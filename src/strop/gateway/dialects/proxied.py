"""What is read of a provider's answer that passes through the gateway: it is recorded, and never changed."""

from __future__ import annotations

from typing import Any, cast

from msgspec import Struct, field

from strop.types import Finish

FINISH: dict[str, Finish] = {
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
}
"""How providers say why an answer ended; whatever else they say is a `stop`."""


class ProxiedChoice(Struct):
    """One choice of a provider's answer, as far as it was read. `calls` are by the place their API gives them, each as
    [id, name, arguments as text]."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    finish: Finish | None = None

    def add_call(self, place: Any, id: Any = None, name: Any = None, arguments: Any = None) -> None:
        """A call, or some more of one."""
        if not isinstance(place, int) or not all(isinstance(part, str | None) for part in (id, name, arguments)):
            raise TypeError("this is not a call of any API")
        call = self.calls.setdefault(place, ["", "", ""])
        call[0], call[1] = call[0] or id or "", call[1] or name or ""
        call[2] += arguments or ""


class ProxiedAnswer:
    """What a provider has answered so far. `ended` is set by a stream's own last event."""

    def __init__(self) -> None:
        self.choices: dict[int, ProxiedChoice] = {}
        self.usage: dict[str, Any] = {}
        self.ended = False

    def choice(self, index: int = 0) -> ProxiedChoice:
        return self.choices.setdefault(index, ProxiedChoice())


def read_finish(reason: str) -> Finish:
    return FINISH.get(reason, "stop")


def join_parts(content: Any) -> str:
    """The text of a content that may be given in parts.

    >>> join_parts([{"type": "text", "text": "What is this? "}, {"type": "image_url", "image_url": {}}])
    'What is this? [image_url]'
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    parts: list[str] = []
    for part in cast("list[Any]", content):
        shown = cast("dict[str, Any]", part) if isinstance(part, dict) else {"text": str(part)}
        text = shown.get("text")
        parts.append(text if isinstance(text, str) else f"[{shown.get('type', 'part')}]")
    return "".join(parts)
