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
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from strop.agent.functions import is_async
from strop.agent.llm import LLM

Calling = Callable[..., Awaitable[Any]]
"""Takes a function and what it is called with; gives what it returns, whether it is `async` or not."""
Work = tuple[Future[Any], Callable[[], Any]]


@contextmanager
def calling(llm: LLM) -> Generator[Calling]:
    if not llm.shares_loop:
        yield finished
        return
    work: SimpleQueue[Work | None] = SimpleQueue()
    thread = Thread(
        target=_worked_off, args=(work,), name="strop-calling", daemon=True
    )  # one that hangs holds up no exit

    async def aside(function: Callable[..., Any], *given: Any) -> Any:
        if is_async(function):
            return await function(*given)
        if thread.ident is None:
            thread.start()
        done: Future[Any] = Future()
        work.put((done, partial(copy_context().run, function, *given)))
        # Shielded: it is called even if nobody waits for it any more, as `close` must be.
        value = await asyncio.shield(asyncio.wrap_future(done))
        return await value if inspect.isawaitable(value) else value

    try:
        yield aside
    finally:
        work.put(None)


async def finished(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns, called here and now."""
    value = function(*given)
    return await value if inspect.isawaitable(value) else value


def _worked_off(work: SimpleQueue[Work | None]) -> None:
    """One after the other, until there is a None."""
    while one := work.get():
        done, ready = one
        try:
            done.set_result(ready())
        except StopIteration:  # which no future can hold
            done.set_exception(RuntimeError("StopIteration was raised"))
        except BaseException as error:
            done.set_exception(error)
