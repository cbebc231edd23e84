"""Short answers compared as text, in the way of SQuAD and HotpotQA: lower case, without punctuation and articles.

Where there are several golden answers the best counts. No answer (None) is worth 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Golden = str | float | Sequence[str | float]
"""One golden answer or several; numbers are taken as they are written."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = {"yes", "no", "noanswer"}


def normalise(text: str) -> str:
    """
    >>> normalise("The  U.S. Navy!")
    'us navy'
    """
    lower = str(text).lower()
    bare = " ".join(_ARTICLES.sub(" ", lower.translate(_PUNCTUATION)).split())
    return bare or " ".join(lower.split())  # "A" and "+" are answers too


def exact_match(answer: str | None, golden: Golden) -> float:
    """1.0 if the normalised texts are the same, otherwise 0.0.

    >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "La tour Eiffel"])
    1.0
    """
    return _best(answer, golden, lambda said, wanted: float(said == wanted))


def f1(answer: str | None, golden: Golden) -> float:
    """How far the words of both overlap: the harmonic mean of precision and recall. Yes and no are never partly right.

    >>> f1("the tall Eiffel Tower", "Eiffel Tower")
    0.8
    >>> f1("no idea", "no")
    0.0
    """
    return _best(answer, golden, _overlap)


def contains(answer: str | None, golden: Golden) -> float:
    """1.0 if the golden answer stands in the answer, word for word, otherwise 0.0. Who lists every answer is right
    as well: use it where answers are short, or together with a penalty for length.

    >>> contains("It was Paris, in 1889.", "paris"), contains("comparison", "paris")
    (1.0, 0.0)
    """
    return _best(answer, golden, lambda said, wanted: float(bool(wanted) and f" {wanted} " in f" {said} "))


def _overlap(said: str, wanted: str) -> float:
    if said == wanted:
        return 1.0
    if said in _CLOSED or wanted in _CLOSED:
        return 0.0
    words, golden = said.split(), wanted.split()
    common = (Counter(words) & Counter(golden)).total()
    return 2 * common / (len(words) + len(golden)) if common else 0.0


def _best(answer: str | None, golden: Golden, score: Callable[[str, str], float]) -> float:
    if answer is None:
        return 0.0
    said = normalise(answer)
    several = [golden] if isinstance(golden, str | float | int) else golden
    return max((score(said, normalise(str(one))) for one in several), default=0.0)
