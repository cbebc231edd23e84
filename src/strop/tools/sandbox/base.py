"""What every box gives: sessions that run code, what came of it, and the same as a tool for one rollout."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Literal, TypeVar

from msgspec import Struct

from strop.agent import tool

T = TypeVar("T")
Ended = Literal["done", "raised", "timeout", "memory", "output", "died"]
"""done: it ran to its end. raised: an exception, or sys.exit with a code. The others ended the interpreter, and its
state is lost: too long, too much memory, endless output, or it ended itself (os._exit, a crash)."""


class CodeResult(Struct, frozen=True, kw_only=True):
    """What one call printed and came to, as the model reads it.

    >>> CodeResult(text="42", ended="done").ok
    True
    """

    text: str
    ended: Ended
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.ended == "done"


class SandboxSession(ABC):
    """What one rollout runs, call after call. Calls of one session wait for each other."""

    @abstractmethod
    async def run(self, code: str) -> CodeResult:
        """Run `code`. Whatever it does is an observation, no longer than a model should read; what raises is our own
        trouble (`StropError`)."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> SandboxSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Box(ABC):
    """Where sessions come from. One box serves any number of them, at the same time and from any event loop."""

    keeps = "Variables, imports and files in the working folder are kept from call to call."
    """What a model is told of its earlier calls."""

    @abstractmethod
    def session(self) -> SandboxSession: ...

    def tool(self) -> PythonTool:
        """A session as a tool, for one rollout."""
        return PythonTool(self)


class PythonTool:
    """A session as a function that a model may call; `close` ends it.

        ToolAgent(tools=lambda task: box.tool())        a session of its own for every rollout
        with box.tool() as python: python("1 + 1")      by hand, where no event loop runs

    The session lives on an event loop in a thread of its own, shared by all tools of the process, so that it can be
    used from plain functions and from any event loop.
    """

    __name__ = "python"

    def __init__(self, box: Box) -> None:
        self._session = box.session()
        self._description = f"Run Python code and return what it prints, and the value of its last line. {box.keeps}"

    def __call__(self, code: str) -> str:
        return _begin(self._session.run(code)).result().text

    async def python(self, code: str) -> tool.Observation:
        """The tool.

        Args:
            code: the Python code
        """
        seen = await asyncio.wrap_future(_begin(self._session.run(code)))
        return tool.Observation(seen.text, None if seen.ok else "timeout" if seen.ended == "timeout" else "error")

    def close(self) -> None:
        _begin(self._session.close()).result()

    def __enter__(self) -> PythonTool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> tool.Tool:
        # The session has its own limits, and shortens what it gives in the middle: what went wrong stands at the end.
        return tool.Tool(self.python, description=self._description, limit=sys.maxsize, timeout=None)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wrap_future(_begin(self._session.close()))


def _begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _background(os.getpid()))


@lru_cache(maxsize=1)
def _background(pid: int) -> asyncio.AbstractEventLoop:
    """An event loop in a thread that lives as long as the process: what it starts dies with the thread that started
    it. A forked process gets one of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="strop-sandbox", daemon=True).start()
    return loop
