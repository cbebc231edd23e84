"""Turns on their way over HTTP: each as what it adds to one before it in the same answer.

    whole turns ──shrink──▶ [TurnDelta, ...] as JSON ──grow──▶ the same whole turns

What is left out was compared first, so that growing gives back every field. A conversation takes bytes as it has turns,
not as their square.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import asdict

from strop.types import Turn


class TurnDelta(Turn, frozen=True, kw_only=True):
    """A turn whose `prompt_ids` and `messages` lack what they begin with: so many ids of the path of turn `ids_from`
    (its prompt and what was sampled), and so many messages of that of `messages_from` (its messages and its answer).
    Both turns stand before it in the list.
    """

    ids_from: str | None = None
    ids_shared: int = 0
    messages_from: str | None = None
    messages_shared: int = 0


def shrink(turns: Iterable[Turn]) -> list[TurnDelta]:
    """Each turn as what it adds to its parent, or else to the turn of its agent before it."""
    seen: dict[str, Turn] = {}
    last: dict[str, Turn] = {}
    deltas: list[TurnDelta] = []
    for turn in turns:
        base = seen.get(turn.parent or "") or last.get(turn.agent)
        deltas.append(_shrink(turn, base))
        seen[turn.id] = last[turn.agent] = turn
    return deltas


def _shrink(turn: Turn, base: Turn | None) -> TurnDelta:
    fields = asdict(turn)
    if base is None:
        return TurnDelta(**fields)
    ids = turn.shared if base.id == turn.parent and 0 < turn.shared <= len(turn.prompt_ids) else 0
    if turn.prompt_ids[:ids] != _path(base, ids):
        ids = 0
    told, messages = [*base.messages, base.answer], 0
    while messages < min(len(told), len(turn.messages)) and _is_same(told[messages], turn.messages[messages]):
        messages += 1
    fields |= {"prompt_ids": turn.prompt_ids[ids:], "messages": turn.messages[messages:]}
    fields |= {"ids_from": base.id if ids else None, "ids_shared": ids}
    return TurnDelta(**fields, messages_from=base.id if messages else None, messages_shared=messages)


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Also in the order of keys, and in what Python takes for equal (True and 1). Turns from the store share theirs."""
    return one is other or msgspec.json.encode(one) == msgspec.json.encode(other)


def grow(deltas: Iterable[TurnDelta]) -> list[Turn]:
    """The whole turns, in the same order."""
    whole: dict[str, Turn] = {}
    for delta in deltas:
        fields: dict[str, Any] = {name: getattr(delta, name) for name in Turn.__struct_fields__}
        if delta.ids_from is not None:
            fields["prompt_ids"] = _path(whole[delta.ids_from], delta.ids_shared) + delta.prompt_ids
        if delta.messages_from is not None:
            base = whole[delta.messages_from]
            fields["messages"] = [*base.messages, base.answer][: delta.messages_shared] + delta.messages
        whole[delta.id] = Turn(**fields)
    return list(whole.values())


def _path(turn: Turn, count: int) -> list[int]:
    """The first ids of what an engine saw and then sampled."""
    return turn.prompt_ids[:count] + turn.response_ids[: max(count - len(turn.prompt_ids), 0)]
