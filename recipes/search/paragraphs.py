"""Search over a handful of paragraphs, without a server: what small models are trained on.

    tools = Paragraphs([{"title": "Ed Wood", "text": "Ed Wood was an American filmmaker."}, ...])
    tools.search("who was Ed Wood?")     Doc 1 (Title: Ed Wood) Ed Wood was an American filmmaker.
    tools.access("Ed Wood")              (Title: Ed Wood) Ed Wood was an American filmmaker.

It finds as `strop search` does by words (BM25, Lucene's form) and speaks as `strop.tools.search.Search` does, so that a
model trained with the one can go on with the other.
"""

import math
from collections import Counter
from collections.abc import Sequence

import strop
from strop.tools.search.bm25 import K1, B, query_words, split_words
from strop.tools.search.documents import normalise_name


class Paragraphs:
    """`topk` paragraphs come of a search; what is longer than `longest` letters is cut."""

    def __init__(self, paragraphs: Sequence[dict[str, str]], *, topk: int = 3, longest: int = 10_000) -> None:
        self._paragraphs, self._topk, self._longest = list(paragraphs), topk, longest
        self._counts = [Counter(split_words(f"{one['title']} {one['text']}")) for one in paragraphs]
        self._mean = sum(count.total() for count in self._counts) / max(1, len(self._counts))

    @strop.tool
    def search(self, query: str) -> str:
        """Search for passages that may help to answer a question.

        Args:
            query: what to look for, as a question or as keywords
        """
        wanted = query_words(query)
        scores = [self._score(wanted, count) for count in self._counts]
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[: self._topk]
        found = [self._paragraphs[at] for at in best if scores[at] > 0]
        if not found:
            return "Nothing was found: search for other words."
        return "\n".join(f"Doc {n} (Title: {one['title']}) {self._cut(one['text'])}" for n, one in enumerate(found, 1))

    @strop.tool
    def access(self, title_or_id: str) -> str:
        """Read the whole page of a title that a search has found.

        Args:
            title_or_id: the page's title
        """
        page = [one for one in self._paragraphs if normalise_name(one["title"]) == normalise_name(title_or_id)]
        if not page:
            return f"There is no page {title_or_id!r}: search first, and take a title from what is found."
        return f"(Title: {page[0]['title']}) " + self._cut("\n".join(one["text"] for one in page))

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._longest else f"{text[: self._longest]} ..."

    def _score(self, wanted: list[str], count: Counter[str]) -> float:
        """BM25 of one paragraph: how often it has the words, and how rare they are among the paragraphs."""
        length = K1 * (1 - B + B * count.total() / self._mean)
        return sum(self._rarity(word) * count[word] / (count[word] + length) for word in wanted if count[word])

    def _rarity(self, word: str) -> float:
        having = sum(word in count for count in self._counts)
        return math.log(1 + (len(self._counts) - having + 0.5) / (having + 0.5))
