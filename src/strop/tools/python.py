"""Python that a model wrote, run in isolation.

    box = PythonBox(seconds=5, memory_mb=512)
    async with box.session() as session:                 an interpreter that stays alive between calls
        observation = await session.run("x = 6 * 7; x")
        observation.text, observation.ok, observation.ended          "42", True, "done"

    ToolAgent(tools=lambda task: box.tool())             the tool python(code), with a session for every rollout
    with box.tool() as python: python("print(1)")        by hand

Isolation is bubblewrap's: namespaces of its own for processes, network, IPC, mounts and host name, a view of nothing
but Python (`sandbox/jail.py`), no capabilities, a filter for system calls (`sandbox/seccomp.py`), hard resource limits.
All of it dies with this process.

What is limited, and how well:

    seconds       of one call, by our clock; then the interpreter is killed
    cpu_seconds   of each process, over the whole session
    memory_mb     of address space in each process, by the kernel; and of memory in all processes of a session together,
                  by a look every 0.05 s, which fast ones outrun by what they can write meanwhile
    disk_mb       of files in the session's folder, which are kept in memory, beside memory_mb; also of one file
    processes     and threads, together; the interpreter and its parent are two of them
    output        characters shown of one call; a call that prints more than 32 MB is ended

Not covered: what the kernel keeps for processes (page tables, buffers of sockets and pipes, the names of empty files),
a fair share of the CPU between sessions, and bugs of the kernel itself. Linux before 5.14 counts `processes` over all
that an ordinary user runs. Who wants a wall around that too gives the runners a cgroup or a virtual machine.

What a session says is what the model's code wants it to say: to judge an answer, run the judge's code in another one.

Left out: cgroups, top-level `await`, rich output (plots).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from strop.errors import ConfigError, StropError
from strop.tools.sandbox import jail, seccomp
from strop.tools.sandbox.base import Box, CodeResult, Ended, PythonTool, SandboxSession
from strop.tools.sandbox.interpreter import Interpreter, SandboxLimits

__all__ = ["Box", "CodeResult", "Ended", "PythonBox", "PythonTool", "SandboxSession"]


class PythonBox(Box):
    """Sessions on this machine. `packages` are installed distributions that the code may import, by name, with those
    that they need: ("numpy", "sympy", "mpmath"). `isolated=False` leaves isolation out: a plain process with the same
    clock and limits, for code you trust; what it starts may outlive it."""

    def __init__(
        self,
        *,
        seconds: float = 5.0,
        memory_mb: int = 512,
        disk_mb: int = 64,
        processes: int = 32,
        cpu_seconds: int = 60,
        output: int = 10_000,
        packages: Sequence[str] = (),
        isolated: bool = True,
    ) -> None:
        for name, value, least in (
            ("seconds", seconds, 0.01),
            ("memory_mb", memory_mb, 64),
            ("disk_mb", disk_mb, 1),
            ("processes", processes, 3),
            ("cpu_seconds", cpu_seconds, 1),
            ("output", output, 100),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}. Fix: give the box at least {least}")
        if isolated:
            jail.check()
            seccomp.build_filter()
        self.limits = SandboxLimits(
            seconds=seconds,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            processes=processes,
            cpu_seconds=cpu_seconds,
            output=output,
            packages=tuple(packages),
            isolated=isolated,
        )

    def session(self) -> SandboxSession:
        """A session. Its interpreter starts with the first call, so one that is never used costs nothing."""
        return _Session(self.limits)


class _Session(SandboxSession):
    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._interpreter: Interpreter | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, code: str) -> CodeResult:
        async with self._turn:
            if self._closed:
                raise StropError("the session is closed. Fix: open another one with box.session()")
            if self._interpreter is None:
                self._interpreter = await Interpreter.start(self._limits)
            began = time.monotonic()
            try:
                text, ended = await self._interpreter.run(code)
            finally:
                if not self._interpreter.alive:
                    interpreter, self._interpreter = self._interpreter, None
                    await interpreter.end()
            return CodeResult(text=text, ended=ended, seconds=time.monotonic() - began)

    async def close(self) -> None:
        async with self._turn:
            self._closed = True
            interpreter, self._interpreter = self._interpreter, None
            if interpreter is not None:
                await interpreter.end()
