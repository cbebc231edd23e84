"""Tools by name, and tools that are made for one rollout and closed after it.

open_tools([add, read], task, call)                   functions and tools, as they are
open_tools(lambda task: [add, read], task, call)      made for this task
open_tools(Files, task, call)                         an object whose methods are tools; closed when the rollout ends
open_tools(lambda task: mcp.Server(...), task, call)  a context manager, sync or async, that gives any of these
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

from strop.agent.functions import Caller
from strop.agent.tool import Function, Observation, Tool
from strop.errors import ConfigError
from strop.types import Task

ToolSource = Sequence[Tool | Function] | Callable[[Task], Any]
"""What an agent's tools are given as."""


class Tools:
    """Tools by name; `schemas` is what requests say about them. Raises `ConfigError` for two of one name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            twice = next(tool.name for tool in tools if sum(other.name == tool.name for other in tools) > 1)
            raise ConfigError(f"tools: two are called {twice}. Fix: give one another name, @strop.tool(name=...)")
        self.schemas = [tool.schema for tool in tools]

    async def run(self, name: str, arguments: str) -> Observation:
        if (tool := self._tools.get(name)) is None:
            there = f"there are {', '.join(self._tools)}" if self._tools else "there are none"
            return Observation(f"error: there is no tool {name}; {there}", "unknown")
        return await tool.run(arguments)

    async def text(self, name: str, arguments: str) -> str:
        """The result as the model sees it."""
        return (await self.run(name, arguments)).text


def check_tools(given: ToolSource) -> ToolSource:
    """What does not depend on the task is made now, so that what is wrong with it is said now."""
    if isinstance(given, Tool):
        return [given]
    if callable(given):
        return given
    items: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for item in items:
        if not isinstance(item, Tool) and not inspect.isroutine(item):
            raise ConfigError(
                f"tools: {type(item).__name__} has to be made for each rollout. Fix: write tools=lambda task: [...]"
            )
    made = [item if isinstance(item, Tool) else Tool(item) for item in items]
    Tools(made)
    return made


@asynccontextmanager
async def open_tools(given: ToolSource, task: Task, call: Caller) -> AsyncGenerator[Tools]:
    """The tools for one rollout. What was made for it is opened and in the end closed by `call`, the last first."""
    async with AsyncExitStack() as stack:
        made: Any = given(task) if callable(given) else given
        if inspect.isawaitable(made):
            made = await made
        yield Tools(await _open(made, stack, call))


async def _open(made: Any, stack: AsyncExitStack, call: Caller) -> list[Tool]:
    if isinstance(made, Tool):
        return [made]
    if inspect.isroutine(made):
        return [Tool(made)]
    if isinstance(made, list | tuple):
        return [tool for item in cast("list[Any]", made) for tool in await _open(item, stack, call)]
    inside = made
    if isinstance(made, AbstractAsyncContextManager):
        inside = await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", made))
    elif isinstance(made, AbstractContextManager):
        manager = cast("AbstractContextManager[Any]", made)
        inside = await call(manager.__enter__)
        stack.push_async_exit(partial(call, manager.__exit__))
    elif callable(close := getattr(made, "aclose", None) or getattr(made, "close", None)):
        stack.push_async_callback(call, close)
    return find_tools(made) if inside is made else await _open(inside, stack, call)


def find_tools(thing: Any) -> list[Tool]:
    """The tools among an object's methods, in the order they are written.

    >>> class Counter:
    ...     @Tool
    ...     def add(self, n: int) -> int:
    ...         return n
    >>> find_tools(Counter())
    [Tool(add)]
    """
    names = [name for kind in reversed(type(thing).__mro__) for name, value in vars(kind).items() if is_tool(value)]
    found = [getattr(thing, name) for name in dict.fromkeys(names)]
    if not found:
        raise ConfigError(
            f"tools: {type(thing).__name__} has no methods that are tools. Fix: write @strop.tool above them"
        )
    return found


def is_tool(value: object) -> bool:
    return isinstance(value, Tool)
