"""Why a conversation does not simply go on from one that was served before."""

from __future__ import annotations

from typing import Literal

Branch = Literal[
    "edited_history",
    "dropped_tool_result",
    "truncated",
    "changed_system",
    "changed_tools",
    "changed_kwargs",
    "template_rewrote",
    "new_conversation",
]


def explain_difference(before: list[bytes], now: list[bytes]) -> Branch:
    """How a conversation differs from one that was served, both as edges (see `Conversation`).

    One that leaves out messages and then goes on was shortened; any other was edited.

    >>> explain_difference([b"u1", b"a1", b"t1", b"a2", b"t2", b"a3"], [b"u1", b"a2", b"t2", b"a3", b"t3"])
    'truncated'
    """
    (old_system, old), (new_system, new) = _parts(before), _parts(now)
    if not set(old).intersection(new):
        return "new_conversation"
    if old_system != new_system:
        return "changed_system"
    kept: list[int] = []  # the places in the old one of what the new one begins with
    for place, edge in enumerate(old):
        if len(kept) < len(new) and edge == new[len(kept)]:
            kept.append(place)
    added = new[len(kept) :]
    if kept == [*range(len(kept))] or any(edge.startswith(b"a") for edge in added):
        return "edited_history"
    gone = [edge for place, edge in enumerate(old[: kept[-1]]) if place not in kept]
    return "dropped_tool_result" if all(edge.startswith(b"t") for edge in gone) else "truncated"


def _parts(edges: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The system's messages at the beginning, and the conversation."""
    first = next((i for i, edge in enumerate(edges) if not edge.startswith(b"s")), len(edges))
    return edges[:first], edges[first:]
