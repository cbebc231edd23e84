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
from typing import Any, Protocol

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


class CallParser(Protocol):
    """One answer. `calls` and `malformed` count what was found so far."""

    calls: int
    malformed: int

    def feed(self, text: str) -> list[Piece]: ...

    def close(self, *, cut: bool = False) -> list[Piece]:
        """The answer is over: what was held back is text after all. `cut`: it reached its limit of tokens."""
        ...


class Format(Protocol):
    """A family's way of writing. `marks` are its special tokens with a meaning in an answer: the parser sees them."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> frozenset[str]: ...

    @property
    def thoughts(self) -> tuple[tuple[str, str], ...]:
        """Pairs of marks around reasoning."""
        ...

    def parser(self, tools: Tools, *, calls: bool, lead: str) -> CallParser:
        """`calls`: whether calls are taken out. `lead` is what the assistant's turn begins with before the model says
        anything: a generation prompt may open its reasoning, an agent may demand a call or begin the answer itself.
        The parser reads it first; none of it is given out, except that a call begun in it is a call."""
        ...

    def begin_call(self, tool: str | None) -> str | None:
        """The beginning of an answer that calls a tool, this one if it is named: given to the model where an agent
        demands a call. None if the family has no such beginning."""
        ...

    def written(self, name: str, arguments: dict[str, Any]) -> str | None:
        """A call as the family writes it, for templates that leave calls out; None if that is not known."""
        ...

    def find_open_thought(self, lead: str) -> str:
        """The mark that ends the thought which a lead leaves open; empty if it leaves none."""
        ...
