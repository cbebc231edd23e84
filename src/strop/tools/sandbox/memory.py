"""How much memory a process and all below it use. Without /proc, nothing is known and nothing counts."""

from __future__ import annotations

import contextlib
import os
import re

RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
SHARE = re.compile(r"^Pss(?:_Anon|_Shmem):\s+(\d+) kB", re.MULTILINE)


def family(pid: int) -> list[int]:
    """The process and all its descendants. In a PID namespace what loses its parent stays below the first process."""
    found = [pid]
    for one in found:  # grows meanwhile
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                found += map(int, _read(f"/proc/{one}/task/{thread}/children").split())
    return found


def over(pid: int, most: int) -> bool:
    """Whether they use more than `most` bytes together. Pages that processes share are counted once; that takes longer
    to find out, so it is asked only where it matters."""
    pids = family(pid)
    return _total(pids, "status", RESIDENT) > most and _total(pids, "smaps_rollup", SHARE) > most


def _total(pids: list[int], name: str, lines: re.Pattern[str]) -> int:
    return sum(1024 * int(size) for pid in pids for size in lines.findall(_read(f"/proc/{pid}/{name}")))


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
