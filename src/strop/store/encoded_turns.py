"""Turns as rows that another process has made: what is left to do here is to insert them.

    worker: Turn ──TurnDraft──▶ row ──▶ here: is its attempt running? ──▶ the table

A turn that can only be compared with what is in the store has no row yet, and is sent whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from strop.errors import TurnTaken
from strop.store.base import Ref
from strop.store.transitions import Db
from strop.store.turn_writes import SELECT, TurnDraft, insert_rows, merge_named, refuse_infinite
from strop.store.written import WrittenTurns
from strop.types import Turn


class EncodedTurn(Struct, frozen=True, array_like=True):
    """`row` is what the table holds of it; `named` has by its hash what is stored once: tools, a grammar."""

    id: str
    rollout: str
    attempt: int
    row: list[Any]
    named: dict[str, str] = {}


class TurnEncoder:
    """Makes rows of turns, and remembers those that were written: most turns go on from one of them."""

    def __init__(self) -> None:
        self._written = WrittenTurns()

    def encode(self, turns: Sequence[Turn]) -> tuple[list[EncodedTurn], list[TurnDraft]] | None:
        """Their rows; None if one of them has to be compared with what is in the store."""
        refuse_infinite(turns)
        drafts = [TurnDraft(turn, self._written) for turn in turns]
        encoded: list[EncodedTurn] = []
        for draft in drafts:
            if draft.links is None:
                return None
            draft.row = draft.encode(draft.links)
            turn, row = draft.turn, draft.row
            encoded.append(EncodedTurn(turn.id, turn.rollout, turn.attempt, row, draft.named))
        return encoded, drafts

    def remember(self, drafts: Sequence[TurnDraft]) -> None:
        """They were written."""
        for draft in drafts:
            if written := draft.written:
                self._written.add(draft.turn, written)

    def forget(self, rollout: str) -> None:
        self._written.forget(rollout)


def find_attempts(turns: Sequence[EncodedTurn]) -> list[Ref]:
    return sorted({(turn.rollout, turn.attempt) for turn in turns})


def insert_encoded(db: Db, turns: Sequence[EncodedTurn]) -> int:
    """Put them into the table but for those whose id is there; returns how many are new."""
    return insert_rows(db, [turn.row for turn in turns], merge_named(turn.named for turn in turns))


def is_recorded(db: Db, turn: EncodedTurn) -> bool:
    """Whether it is there, the same in every column. Another one of the same id is refused."""
    found = db.execute(SELECT, (turn.id,)).fetchone()
    if found is not None and list[Any](found) != turn.row:
        raise TurnTaken(f"turn {turn.id!r} was recorded before. Fix: give each turn an id of its own")
    return found is not None
