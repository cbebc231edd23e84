"""Calls of the user's functions, which may be `async` or not.

    run_until_done(agent(task, llm))         where no event loop runs

    with function_caller(llm) as call:       for one rollout, so that other rollouts do not wait for it
        await call(environment.reset, task)

Where the event loop belongs to one agent (processes, threads) functions are simply called. Where agents share it, a
function that is not `async` would block all of them, and the gateway: there it runs in a thread that the rollout has
for all such functions, one after the other. So what they share is touched by one at a time, and may belong to that
thread.
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

from strop.agent.llm import LLM

CANCEL_SECONDS = 1.0
"""Seconds that tasks left over have to end once they are cancelled."""

Caller = Callable[..., Awaitable[Any]]
"""Takes a function and its arguments; gives what it returns, whether it is `async` or not."""
Work = tuple[Future[Any], Callable[[], Any]]


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def run_until_done(value: Any) -> Any:
    """The value, or what it comes to if it is awaitable. For where no event loop runs.

    Tasks that are left over are cancelled as `asyncio.run` does it, but those that ignore that hold nothing up.
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
            loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def function_caller(llm: LLM) -> Generator[Caller]:
    if not llm.shares_loop:
        yield _call
        return
    work: SimpleQueue[Work | None] = SimpleQueue()
    # A daemon: a function that hangs holds up no exit.
    thread = Thread(target=_do_work, args=(work,), name="strop-functions", daemon=True)

    async def call(function: Callable[..., Any], *given: Any) -> Any:
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
        yield call
    finally:
        work.put(None)


async def _call(function: Callable[..., Any], *given: Any) -> Any:
    value = function(*given)
    return await value if inspect.isawaitable(value) else value


def _do_work(work: SimpleQueue[Work | None]) -> None:
    """One after the other, until there is a None."""
    while one := work.get():
        done, ready = one
        try:
            done.set_result(ready())
        except StopIteration:  # which no future can hold
            done.set_exception(RuntimeError("StopIteration was raised"))
        except BaseException as error:
            done.set_exception(error)
