r"""Whether two answers to a mathematical question are the same.

    equal text, numbers and fractions     at once, here
    everything else                       math-verify (`pip install math-verify`), in a process of its own

What counts as the same, beside what algebra says:
- a percent sign may be left out or worked out: 50\% is 50 and 0.5, though 50 is not 0.5;
- units, degrees, a currency sign and \text{...} around a word do not matter, nor does a variable in front: x = 5 is 5;
- a decimal is the same as a fraction or root if they agree to six places: 0.333333 is 1/3, 0.333 is not;
- in sets, and in answers listed without brackets, order does not matter; in tuples and intervals it does, and so does
  whether an interval holds its ends.

The answer is taken whole: `last_boxed` and its kin (extract.py) find it in what a model said.

Left out: numbers in other bases (11_3 is read as 11), and words that mean a number.
"""

from __future__ import annotations

import re
from fractions import Fraction

from strop.rewards import worker

LONGEST = 1000
"""Characters. A longer answer is the golden one only if it is written in the same way."""

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_INVISIBLE = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[!,;: ]|(?<!\d)[\s~]+|[\s~]+(?!\d)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?:[ ~]\d{3})+)(?:\.\d+)?")
_MONEY = re.compile(r"(?<=\d)\s+(?:dollars?|euros?)$", re.IGNORECASE)
_WORD = re.compile(r"[a-zA-Z]{4,}")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac(?:\{([-+]?[\d.]+)\}\{([-+]?[\d.]+)\}|(\d)(\d))")
_DECIMAL = re.compile(r"[-+]?(?:\d{1,200}(?:\.\d{0,200})?|\.\d{1,200})(?:[eE][-+]?\d{1,2})?")


def math_equal(answer: str | float | None, golden: str | float, *, seconds: float = 2.0) -> bool:
    r"""Whether `answer` is `golden`. What cannot be decided within `seconds` is not.

    >>> math_equal(r"\frac12", "0.5"), math_equal("1,000", 1000), math_equal("$12", "13"), math_equal(None, "1")
    (True, True, False, False)
    """
    if answer is None:
        return False
    said, wanted = plain(str(answer)), plain(str(golden))
    if said == wanted:
        return bool(said)
    one, other = number(said), number(wanted)
    if one is not None and other is not None:
        return _close(one, other)
    if _WORD.fullmatch(said) and _WORD.fullmatch(wanted):
        return said.lower() == wanted.lower()  # and not letters multiplied: east is not seat
    first, last = (number(side) for side in (said.partition("=")[0], said.rpartition("=")[2]))
    if first is not None and last is not None and not _close(first, last):
        return False  # 5 = 7 says neither
    texts = [_unwrap(str(text)) for text in (answer, golden)]
    if not all(texts) or max(map(len, texts)) > LONGEST:
        return False
    try:
        return bool(worker.call("equal", texts, seconds))
    except TimeoutError:
        return False


def plain(text: str) -> str:
    r"""The text without what only changes how it looks.

    >>> plain(r"$\left( 1{,}000,\ \text{east} \right).$"), plain(r"\dfrac{1}{2}"), plain("1,000")
    ('(1,000,east)', '\\frac{1}{2}', '1000')
    """
    text = _WRAPPED.sub(r"\1", _unwrap(text))
    text = _INVISIBLE.sub("", text.replace("{,}", ",")).removesuffix(".")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\%", "%")
    return re.sub("[, ~]", "", text) if _THOUSANDS.fullmatch(text) else text


def number(text: str) -> Fraction | None:
    r"""A plain number or fraction, exactly; None for anything else, and for numbers that nobody writes out.

    >>> number("-1.50"), number("3/4"), number(r"\frac{3}{4}"), number("50%")
    (Fraction(-3, 2), Fraction(3, 4), Fraction(3, 4), None)
    """
    if found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        above, below = (part for part in parts if part is not None)
        found = number(f"{above}/{below}")
        return -found if found is not None and sign == "-" else found
    above, slash, below = text.partition("/")
    if slash:
        one, other = number(above), number(below) if "/" not in below else None
        return one / other if one is not None and other else None
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _close(one: Fraction, other: Fraction) -> bool:
    """To six places, and small numbers to six digits."""
    return abs(one - other) <= Fraction(1, 10**6) * min(1, max(abs(one), abs(other)))


def _unwrap(text: str) -> str:
    r"""Without the signs that say that it is mathematics, or an amount of money."""
    text = text.strip().replace("\\$", "").replace("$", "")
    for before, after in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.removeprefix(before).removesuffix(after)
    return _MONEY.sub("", text.strip())
