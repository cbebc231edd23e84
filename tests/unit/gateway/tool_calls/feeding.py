"""Feeding a parser in pieces, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from strop.gateway.tool_calls.base import ParsedCall, Piece, Thought
from strop.gateway.tool_calls.reader import Grammar


class Heard(NamedTuple):
    words: str
    thoughts: str
    calls: list[ParsedCall]
    malformed: int


def hear(
    format: Grammar, text: str, *, sizes: Sequence[int] = (), tools: Sequence[dict[str, Any]] = (), calls: bool = True,
    lead: str = "", cut: bool = False,
) -> Heard:  # fmt: skip
    """Feed `text` in pieces of these sizes, over and over; in one piece if there are none. Calls are without ids.
    `cut`: the answer had no room to end."""
    parser = format.parser(tools, calls=calls, lead=lead)
    pieces: list[Piece] = []
    at = turn = 0
    while at < len(text):
        size = sizes[turn % len(sizes)] if sizes else len(text)
        pieces += parser.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    pieces += parser.close(cut=cut)
    assert all(piece.text if isinstance(piece, Thought) else piece for piece in pieces), "no empty pieces"
    found = [ParsedCall(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ParsedCall)]
    assert parser.calls == len(found)
    return Heard(
        "".join(piece for piece in pieces if isinstance(piece, str)),
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        found,
        parser.malformed,
    )


def ids(format: Grammar, text: str, *, tools: Sequence[dict[str, Any]], lead: str) -> list[str | None]:
    """The ids that the model gave its calls."""
    parser = format.parser(tools, calls=True, lead=lead)
    return [piece.id for piece in parser.feed(text) + parser.close() if isinstance(piece, ParsedCall)]
