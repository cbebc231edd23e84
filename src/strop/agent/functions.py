"""Functions of the user's, which may be `async` or not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

PATIENCE = 1.0
"""Seconds that tasks left behind have to end once they are cancelled."""


def awaited(value: Any) -> Any:
    """The value, or what it comes to if it has to be waited for. For where no event loop runs.

    Tasks that are left behind are cancelled as `asyncio.run` does it, but those that take no notice hold nothing up.
    """

    async def wait() -> Any:
        return await value

    if not inspect.isawaitable(value):
        return value
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(wait())
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=PATIENCE))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
