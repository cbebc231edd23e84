"""What looks like the process's own to agents that share one, and belongs to the rollout: variables and output.

    install()                          once, before the agent is imported
    with entered(Surrounds(...)):      in the task of a rollout; tasks and `asyncio.to_thread` below it inherit it
        os.environ["OPENAI_BASE_URL"]  the rollout's own
        print("hello")                 goes to `Surrounds.say_printed`

Left out: what is below Python. A child process, os.write and C libraries see the process's variables and descriptors; a
child needs `env={**os.environ}` to have the rollout's.
"""

from __future__ import annotations

import os
import sys
from asyncio import Task
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO, cast
from weakref import WeakSet


@dataclass
class Surrounds:
    """Of one rollout. A variable that is None was deleted."""

    say_printed: Callable[[str], None]
    variables: dict[str, str | None]
    tasks: WeakSet[Task[Any]] = field(default_factory=WeakSet[Task[Any]])


_current: ContextVar[Surrounds | None] = ContextVar("strop_rollout", default=None)


@contextmanager
def entered(surrounds: Surrounds) -> Generator[None]:
    token = _current.set(surrounds)
    try:
        yield
    finally:
        _current.reset(token)


def add_task(task: Task[Any]) -> None:
    """A task that was begun in a rollout belongs to it."""
    if (surrounds := _current.get()) is not None:
        surrounds.tasks.add(task)


def install() -> None:
    """From now on the environment and the output of this process are those of the rollout where there is one."""
    if not isinstance(os.environ, RolloutEnviron):
        os.environ = cast("Any", RolloutEnviron(os.environ))  # noqa: B003 - it reads and writes the one it replaces
        sys.stdout, sys.stderr = (cast("TextIO", RolloutStream(stream)) for stream in (sys.stdout, sys.stderr))


class RolloutEnviron(MutableMapping[str, str]):
    """`os.environ` for agents that share a process: the rollout's variables before those of the process."""

    def __init__(self, process: MutableMapping[str, str]) -> None:
        self._process = process

    def __getitem__(self, name: str) -> str:
        if (surrounds := _current.get()) is not None and name in surrounds.variables:
            if (value := surrounds.variables[name]) is None:
                raise KeyError(name)
            return value
        return self._process[name]

    def __setitem__(self, name: str, value: str) -> None:
        if (surrounds := _current.get()) is None:
            self._process[name] = value
        elif isinstance(name, str) and isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            surrounds.variables[name] = value
        else:
            raise TypeError(f"a variable is text, not {name!r} = {value!r}. Fix: write it as str(...)")

    def __delitem__(self, name: str) -> None:
        if (surrounds := _current.get()) is None:
            del self._process[name]
        elif name in self:
            surrounds.variables[name] = None
        else:
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        surrounds = _current.get()
        names = dict.fromkeys((*self._process, *(surrounds.variables if surrounds else ())))
        return iter([name for name in names if name in self])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def copy(self) -> dict[str, str]:
        return dict(self)

    def __or__(self, other: Any) -> dict[str, str]:
        return {**self, **other}

    def __ror__(self, other: Any) -> dict[str, str]:
        return {**other, **self}

    def __ior__(self, other: Any) -> RolloutEnviron:
        self.update(other)
        return self


class RolloutStream:
    """`sys.stdout` for agents that share a process: what is printed in a rollout is told, the rest goes to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if (surrounds := _current.get()) is None:
            return self._stream.write(text)
        if text:
            surrounds.say_printed(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
