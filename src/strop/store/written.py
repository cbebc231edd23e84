"""What was written lately, so that a turn is compared and hashed from where the one before it ended.

It saves work and decides nothing: bytes and hashes are those that the whole turn has, and rows never change.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from msgspec import Struct

from strop.types import Turn

LIMIT = 64 << 20
"""Bytes that are kept, about."""
MAX_TURNS = 512
"""Rollouts of which turns are kept, and turns of each: more do not go on at the same time."""


class HashedBytes(Struct, gc=False):
    """Bytes, and hashes of their beginnings. Bytes that begin with others go on from the hashes of those.

    >>> short = HashedBytes(b"abc")
    >>> HashedBytes(b"abcdef", short).hash(5) == HashedBytes(b"abcdef").hash(5) != short.hash(2)
    True
    """

    data: bytes
    begin: HashedBytes | None = None
    _end: int = 0
    _state: blake2b | None = None

    def __post_init__(self) -> None:
        """What it begins with has been compared by the caller."""
        if self.begin is not None:
            self._end, self._state = self.begin._end, self.begin._state
            self.begin = None  # or all of a conversation would be kept

    def hash(self, end: int) -> bytes:
        """Of the first `end` bytes."""
        assert end <= len(self.data)
        if self._state is None or end < self._end:
            state = blake2b(self.data[:end], digest_size=16)
        elif end == self._end:
            return self._state.digest()
        else:
            state = self._state.copy()
            state.update(self.data[self._end : end])
        self._end, self._state = end, state
        return state.digest()


class WrittenTurn(Struct, frozen=True, gc=False):
    """A turn's row, its prompt as numbers and as bytes, the JSON of its messages and where each of them begins in it.
    All of it is bytes, text and numbers. The prompt is a list, since Python compares those several times as fast."""

    row: tuple[Any, ...]
    prompt_ids: list[int]
    ids: HashedBytes
    text: HashedBytes
    ends: tuple[int, ...]

    @property
    def size(self) -> int:
        return 8 * len(self.ends) + 3 * len(self.ids.data) + len(self.text.data)


class WrittenTurns:
    """The last turns of conversations, by rollout and id: not those that another went on from."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.size = 0
        self._limit = limit
        self._turns: dict[str, dict[str, WrittenTurn]] = {}

    def find(self, rollout: str, id: str | None) -> WrittenTurn | None:
        turns = self._turns.get(rollout)
        return turns.get(id or "") if turns else None

    def add(self, turn: Turn, written: WrittenTurn) -> None:
        turns = self._turns.pop(turn.rollout, None)
        if turns is None:
            turns = {turn.id: written}
        else:
            for id in (turn.id, turn.parent or ""):
                if old := turns.pop(id, None):
                    self.size -= old.size
            turns[turn.id] = written
            if len(turns) > MAX_TURNS:
                self.size -= turns.pop(next(iter(turns))).size
        self._turns[turn.rollout] = turns  # the one that spoke last is the last to be dropped
        self.size += written.size
        while self.size > self._limit or len(self._turns) > MAX_TURNS:
            self.forget(next(iter(self._turns)))

    def forget(self, rollout: str) -> None:
        """Drop the turns of a rollout that has ended."""
        self.size -= sum(turn.size for turn in self._turns.pop(rollout, {}).values())
