"""What was written lately, so that a turn is packed and hashed from where the one before it ended.

It saves work and decides nothing: bytes and hashes are those that the whole turn has, and rows never change.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from strop.store.turns import EarlierTurn

LIMIT = 64 << 20
"""Bytes that are kept, about."""
MAX_TURNS = 512
"""Turns that are kept: conversations that go on at the same time are fewer, and what is kept is looked through whenever
Python collects garbage."""
STATES = 4
"""How many places a hash can go on from."""


class HashedBytes(Struct, gc=False):
    """Bytes, and hashes of their beginnings. Bytes that begin with others go on from the hashes of those.

    >>> short = HashedBytes(b"abc")
    >>> HashedBytes(b"abcdef", short).hash(5) == HashedBytes(b"abcdef").hash(5) != short.hash(2)
    True
    """

    data: bytes
    begin: HashedBytes | None = None
    _states: dict[int, blake2b] | None = None

    def __post_init__(self) -> None:
        if self.begin is not None:
            if self.begin._states and self.data.startswith(self.begin.data):
                self._states = self.begin._states.copy()
            self.begin = None  # or all of a conversation would be kept

    def hash(self, end: int) -> bytes:
        """Of the first `end` bytes."""
        if self._states is None:
            self._states = {}
        if (state := self._states.get(end)) is None:
            last = max((at for at in self._states if at < end), default=0)
            state = self._states[last].copy() if last else blake2b(digest_size=16)
            state.update(self.data[last:end])
            self._states[end] = state
            if len(self._states) > STATES:
                del self._states[min(self._states)]
        return state.digest()


class WrittenTurn(Struct, frozen=True, gc=False):
    """A turn's row, its prompt, as ids and packed, and the JSON of its messages."""

    row: EarlierTurn
    prompt_ids: list[int]
    ids: HashedBytes
    text: HashedBytes

    @property
    def size(self) -> int:
        return 8 * len(self.prompt_ids) + len(self.ids.data) + len(self.text.data)


class WrittenTurns:
    """The turns that were written last, by id."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.size = 0
        self._limit = limit
        self._turns: OrderedDict[str, WrittenTurn] = OrderedDict()
        self._ids: dict[str, set[str]] = {}  # of each rollout

    def find(self, id: str | None) -> WrittenTurn | None:
        if id is None or (found := self._turns.get(id)) is None:
            return None
        self._turns.move_to_end(id)
        return found

    def add(self, turn: WrittenTurn) -> None:
        id = turn.row.id
        self._drop(id)
        self._turns[id] = turn
        self._ids.setdefault(turn.row.rollout, set()).add(id)
        self.size += turn.size
        while self.size > self._limit or len(self._turns) > MAX_TURNS:
            self._drop(next(iter(self._turns)))

    def forget(self, rollout: str) -> None:
        """Drop the turns of a rollout that has ended."""
        for id in [*self._ids.get(rollout, ())]:
            self._drop(id)

    def _drop(self, id: str) -> None:
        if (old := self._turns.pop(id, None)) is None:
            return
        self.size -= old.size
        ids = self._ids[old.row.rollout]
        ids.discard(id)
        if not ids:
            del self._ids[old.row.rollout]
