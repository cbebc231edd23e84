"""What a process printed, as events of its rollout, and how it ended, in words.

    bytes ──take──▶ texts of whole lines ──message──▶ data of a "message" event

The beginning of a stream is told (`KEPT`); of the rest only its size (`make_dropped_message`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

PIECE = 8 << 10
"""Most bytes of output in one event."""
KEPT = 1 << 20
"""Most bytes of one stream that become events."""
LAST_WORDS = 2.0
"""Seconds that telling what an agent printed may take once it was stopped."""


def take(printed: bytearray, *, last: bool) -> Iterator[str]:
    """Take from the beginning as many whole lines as fit at a time; a line that does not fit is cut between characters.
    What is left of a line stays for the rest of it, unless this is the last of all.

    >>> printed = bytearray(b"short\\n" + b"x" * 10_000 + b"\\nend")
    >>> [len(text) for text in take(printed, last=False)], bytes(printed)
    ([6, 8192, 1809], b'end')
    """
    while size := _size(printed, last):
        piece = printed[:size]
        del printed[:size]
        yield decode(piece)


def _size(printed: bytearray, last: bool) -> int:
    if last and len(printed) <= PIECE:
        return len(printed)
    if line := printed.rfind(b"\n", 0, PIECE) + 1:
        return line
    return _between_characters(printed, PIECE) if len(printed) > PIECE else 0


def _between_characters(text: bytearray, at: int) -> int:
    """`at`, or up to three bytes before it, where a character of UTF-8 begins."""
    return next((n for n in range(at, at - 4, -1) if text[n] & 0xC0 != 0x80), at)


def decode(printed: bytes | bytearray) -> str:
    return printed.decode(errors="replace").replace("\0", "\ufffd")  # PostgreSQL keeps none in text


def make_message(stream: str, text: str) -> dict[str, Any]:
    return {"stream": stream, "text": text}


def make_dropped_message(stream: str, count: int) -> dict[str, Any]:
    return make_message(stream, f"... {count} more bytes were printed and are not kept") | {"dropped": count}


async def in_time(telling: Coroutine[Any, Any, None]) -> None:
    """What a stopped agent printed may say why it took so long, but the caller does not wait for ever."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(telling, LAST_WORDS)


def describe_end(code: int | None) -> str:
    """
    >>> describe_end(3), describe_end(-9), describe_end(None)
    ('exit code 3', 'killed by SIGKILL', 'it is not known how')
    """
    if code is None:
        return "it is not known how"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
