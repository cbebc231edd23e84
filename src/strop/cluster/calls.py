"""Calls to actors on nodes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

PREFER_SECONDS = 20.0
"""Seconds for which a host's planned node is waited for; then it may be any."""


async def ask(ref: Any, seconds: float | None) -> Any:
    """What an actor answers. Raises `TimeoutError`, or what Ray raises."""
    async with asyncio.timeout(seconds):  # `wait_for` may forget that it was cancelled, before Python 3.12
        return await asyncio.wrap_future(ref.future())


def end_actor(ray: Any, actor: Any) -> None:
    """With the process that it has started."""
    with contextlib.suppress(Exception):  # it may be gone, with its node
        ray.kill(actor)


def find_cause(error: BaseException) -> str:
    """In a line: what was raised on the node, where that is known. Ray's own text begins with a traceback.

    >>> find_cause(PermissionError(13, "Permission denied"))
    'PermissionError: [Errno 13] Permission denied'
    """
    cause = getattr(error, "cause", None)
    cause = cause if isinstance(cause, BaseException) else error
    said = " ".join(str(cause).split())[:300]
    return f"{type(cause).__name__}: {said}" if said else type(cause).__name__
