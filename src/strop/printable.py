"""Text of agents, models and tools as it may be shown: their control characters are pictures, not orders.

A terminal obeys escape sequences (titles, colours, clearing the screen, answers typed as if by the user), and
characters that turn the direction of writing make one thing look like another. Records keep what was said; only what is
shown is changed.
"""

from __future__ import annotations

import re

_ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"  # line and paragraph ends of Unicode's own, directions
)


def escape_text(text: str) -> str:
    """
    >>> escape_text("a\\x1b[31mb\\x9b\\u202ec\\r\\nd")
    'a␛[31mb\\\\x9b\\\\u202ec\\nd'
    """
    return _ORDERS.sub(_picture, text.replace("\r\n", "\n"))


def escape_json(json: str) -> str:
    r"""JSON that says the same without such characters.

    >>> escape_json('"a\x9bb"')
    '"a\\u009bb"'
    """
    return _ORDERS.sub(lambda found: f"\\u{ord(found[0]):04x}", json)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
