"""The answer within what a model said. Each returns None where there is none, which every reward takes as wrong.

The last one counts everywhere: models think aloud first and answer in the end.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+−]?\d+)?")
"""Its minus may be the typographic one, U+2212."""


def last_boxed(text: str | None) -> str | None:
    r"""What is in the last \boxed{...}, with its braces balanced; \fbox{...} is as good.

    >>> last_boxed(r"so \boxed{1} or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> last_boxed(r"\boxed{1} and \boxed{2") is None  # cut off
    True
    """
    text = text or ""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth, at = 1, first
    while at < len(text):
        if text[at] == "\\":  # \{ and \} are signs, not braces
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[first:at].strip()
        at += 1
    return None


def after_hashes(text: str | None) -> str | None:
    """What follows the last ####, up to the end of its line, as in GSM8K.

    >>> after_hashes("9 * 2 = <<9*2=18>>18\\n#### 18")
    '18'
    """
    _, mark, rest = (text or "").rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def last_tag(text: str | None, name: str = "answer") -> str | None:
    """What is in the last <answer>...</answer>, or in another tag.

    >>> last_tag("<answer>Rome</answer> no, <answer> Paris </answer>")
    'Paris'
    """
    text = text or ""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(name) + 2 : end].strip()


def last_number(text: str | None) -> str | None:
    """The last number as it is written, without the commas between thousands, and with - for a typographic minus.

    >>> last_number("3 bags cost $1,250.50."), last_number("from -3 to 4e-2"), last_number("none")
    ('1250.50', '4e-2', None)
    >>> last_number("The answer is −5")
    '-5'
    """
    found = _NUMBER.findall(text or "")
    return found[-1].replace(",", "").replace("−", "-") if found else None
