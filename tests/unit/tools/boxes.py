"""Boxes for tests, and a way to see whether anything of one is left."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

from strop.tools.python import PythonBox

needs_walls = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed (make sandbox)")
_marks = itertools.count(random.randrange(10_000, 20_000_000))


class Marked:
    """A box whose processes can be told from all others: how much output it keeps stands in their command lines."""

    def __init__(self, **limits: float) -> None:
        self.mark = next(_marks)
        given = {"seconds": 3.0, "memory_mb": 256, "disk_mb": 16, "processes": 24} | limits
        self.box = PythonBox(**{**given, "output": self.mark})  # type: ignore[arg-type]

    def processes(self) -> list[int]:
        end = f"\0{self.mark}\0".encode()
        found: list[int] = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if Path(f"/proc/{name}/cmdline").read_bytes().endswith(end):
                    found.append(int(name))
            except OSError:
                continue
        return found

    async def gone(self, but: int = 0) -> bool:
        """Whether in a while no more than so many are left."""
        for _ in range(100):
            if len(self.processes()) <= but:
                return True
            await asyncio.sleep(0.05)
        return False
