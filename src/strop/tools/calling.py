"""Functions of the user's, called for one rollout so that nobody else has to wait for them.

    with calling(llm) as call:
        await call(environment.reset, task)

Where the event loop is the agent's own (processes, threads) they are simply called. Where many agents share it, one
that is not `async` would stop them all, and the gateway: there it runs in a thread that the rollout has for all such
functions, one after the other. So what they share is touched by one at a time, and may belong to that thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from strop.runners.llm import LLM
from strop.runners.rewards import is_async

Calling = Callable[..., Awaitable[Any]]
"""Takes a function and what it is called with; gives what it returns, whether it is `async` or not."""


@contextmanager
def calling(llm: LLM) -> Generator[Calling]:
    if not llm.shares_loop:
        yield finished
        return
    thread = ThreadPoolExecutor(1, "strop-calling")

    async def aside(function: Callable[..., Any], *given: Any) -> Any:
        if is_async(function):
            return await function(*given)
        ready = partial(copy_context().run, _returned, function, *given)
        work = asyncio.get_running_loop().run_in_executor(thread, ready)
        value = await asyncio.shield(work)  # called even if nobody waits for it any more, as `close` must be
        return await value if inspect.isawaitable(value) else value

    try:
        yield aside
    finally:
        thread.shutdown(wait=False)


async def finished(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns, called here and now."""
    value = function(*given)
    return await value if inspect.isawaitable(value) else value


def _returned(function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except StopIteration as error:  # which no future can hold
        raise RuntimeError("StopIteration was raised") from error
