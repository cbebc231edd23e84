"""How a model family writes reasoning and tool calls, found by looking at its chat template.

    format = find(template)                           Hermes, Llama, Mistral, ... (families.py has the table)
    parser = format.parser(tools, calls=True, lead="")    one per answer, fed as text arrives
    parser.feed('Let me see.<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        ['Let me see.', Call('now', {})]

A parser gives out only what no later text can change, so that streaming cannot change an answer. A call that is not
well-formed stays text, as the model wrote it: the agent sees what happened, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

Tools = Sequence[dict[str, Any]]
"""Tools as chat completions have them: `{"type": "function", "function": {"name": ..., "parameters": schema}}`."""


class ParsedCall(Struct, frozen=True, repr_omit_defaults=True):
    """A tool call as the model wrote it: `Call("calculator", {"expression": "3 * 4"})`. `id` is the one that it gave
    the call itself, in families whose templates write ids."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Thought(Struct, frozen=True):
    """Reasoning that is shown apart from the answer."""

    text: str


Piece = str | Thought | ParsedCall
