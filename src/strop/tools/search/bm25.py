"""Search by words: BM25 (Lucene's form, k1 = 1.2, b = 0.75), with bm25s.

A score of every word in every passage is computed once, when the index is built; a query adds up the scores of its
words. The scores are memory-mapped, the words are in memory.

Left out: stemming.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from strop.errors import PlaceError
from strop.tools.search.base import Hit, Hits, Progress, import_optional

K1, B = 1.2, 0.75
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
SHARES = (0.5, 0.25, 0.1)
"""Of the best score: what is above the first share that enough passages reach is put in order, the rest is not."""


def split_words(text: str) -> list[str]:
    """Words in small letters; Chinese and Japanese, which have no spaces, letter by letter.

    >>> split_words("Ed Wood's 1994 film 艾德")
    ['ed', 'wood', 's', '1994', 'film', '艾', '德']
    """
    return _WORD.findall(text.casefold())


STOPWORDS = frozenset(
    split_words(
        "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
        "this to was will with"
    )
)


def query_words(query: str) -> list[str]:
    """The words that are searched for: those that are everywhere only if there are no others.

    >>> query_words("the director of It"), query_words("The The")
    (['director'], ['the', 'the'])
    """
    found = split_words(query)
    return [word for word in found if word not in STOPWORDS] or found


def import_bm25s() -> Any:
    """bm25s, imported as if there were no jax: it would use that where it is installed, and the first touch of jax
    takes most of a GPU's memory for itself."""
    if "bm25s" in sys.modules:
        return import_optional("bm25s")
    before = sys.modules.get("jax")
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType] (Python's own way to say that it cannot be had)
    try:
        return import_optional("bm25s")
    finally:
        del sys.modules["jax"]
        if before is not None:
            sys.modules["jax"] = before


class _Numbered(Struct):
    """What bm25s takes: the words of each passage as numbers, and which number each word has."""

    ids: _Stored
    vocab: dict[str, int]


class _Stored:
    """The words of each passage, from a file. They are gone through three times to make an index."""

    def __init__(self, file: Path, lengths: Sequence[int], progress: Progress) -> None:
        self._numbers = np.memmap(file, np.int32, "r")
        self._lengths, self._progress, self._passes = lengths, progress, 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for number, length in enumerate(self._lengths):
            if number % 1000 == 0:
                self._progress("scoring words", self._passes * len(self) + number, 3 * len(self))
            yield self._numbers[begin : begin + length].tolist()
            begin += length
        self._passes += 1


class Builder:
    """Takes passages one by one; `close` makes the index of them."""

    def __init__(self, folder: Path) -> None:
        self._bm25s = import_bm25s()
        self._folder, self._words = folder, folder / "words.part"
        self._file = self._words.open("wb")
        self._lengths, self._vocabulary = array("q"), dict[str, int]()

    def add(self, contents: str) -> None:
        vocabulary = self._vocabulary
        numbers = array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(contents)])
        self._lengths.append(len(numbers))
        self._file.write(numbers)

    def close(self, progress: Progress) -> None:
        self._file.close()
        if not self._vocabulary:
            raise PlaceError("the corpus has no words to search for. Fix: check its texts")
        made = self._bm25s.BM25(method="lucene", k1=K1, b=B)
        stored = _Stored(self._words, self._lengths, progress)
        made.index(_Numbered(stored, self._vocabulary), create_empty_token=False, show_progress=False)
        made.save(self._folder / "bm25", show_progress=False)
        self._words.unlink()

    def discard(self) -> None:
        self._file.close()


class Bm25:
    """An index as `Builder` made it, memory-mapped. Any number of threads may ask at once."""

    def __init__(self, folder: Path) -> None:
        self._index: Any = import_bm25s().BM25.load(folder / "bm25", mmap=True)
        # Plain views of the same mapped memory: slices of numpy's memmap class cost more than what is done with them.
        scores = self._index.scores
        scores.update({name: np.asarray(scores[name]) for name in ("data", "indices", "indptr")})

    def search(self, queries: Iterable[str], topk: int) -> list[Hits]:
        """Per query the best passages, best first; of equals the one that comes first in the corpus. Passages that
        have none of the words are left out."""
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> Hits:
        numbers = self._index.get_tokens_ids(query_words(query))
        return find_best(self._index.get_scores_from_ids(numbers), topk) if numbers else []


def find_best(scores: np.ndarray[Any, Any], topk: int) -> list[Hit]:
    """Numbers and scores of the highest ones above 0.

    >>> find_best(np.array([0.0, 2.0, 1.0, 2.0]), 2)
    [(1, 2.0), (3, 2.0)]
    """
    highest = scores.max()
    for share in SHARES:  # few passages are near the best one, and finding those is quicker than any sorting
        near = np.flatnonzero(scores > share * highest)
        if len(near) >= topk:
            break
    else:
        near = np.flatnonzero(scores > 0)
    chosen = near[np.argsort(-scores[near], kind="stable")[:topk]]
    return [(int(number), float(scores[number])) for number in chosen]
