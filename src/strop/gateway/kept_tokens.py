"""The tokens of texts that were tokenised lately: what is tokenised again is looked up.

The members of a group begin alike, and those that ask their tools for the same are told the same. Whatever text it is,
its tokens are those that the tokenizer gave for the very same text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

LONGEST = 16_384
"""Characters of a text that is kept: what is long hardly comes again."""
LIMIT = 16 << 20
"""Bytes that all of them may take, about."""
_ENTRY, _CHARACTER, _TOKEN = 200, 4, 40
"""Bytes of an entry, of a character at most, and of a token: its number, and its place in a tuple."""


class KeptTokens:
    """`size` is about how many bytes are kept; those used last stay."""

    def __init__(self, encode: Callable[[str], list[int]], limit: int = LIMIT) -> None:
        self.size = 0
        self._encode, self._limit = encode, limit
        self._kept: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, in a list of the caller's own."""
        if (found := self._kept.get(text)) is not None:
            self._kept.move_to_end(text)
            return list(found)
        ids = self._encode(text)
        if len(text) <= LONGEST:
            self._kept[text] = tuple(ids)
            self.size += _size(text, ids)
            while self.size > self._limit:
                self.size -= _size(*self._kept.popitem(last=False))
        return ids


def _size(text: str, ids: list[int] | tuple[int, ...]) -> int:
    return _ENTRY + _CHARACTER * len(text) + _TOKEN * len(ids)
