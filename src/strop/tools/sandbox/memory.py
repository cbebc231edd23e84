"""How much memory a process and all below it use, and whether any of it runs.

Without /proc, nothing is known and nothing counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from strop.net.process_group import list_descendants

RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
SHARE = re.compile(r"^Pss(?:_Anon|_Shmem):\s+(\d+) kB", re.MULTILINE)


def exceeds(pid: int, most: int) -> bool:
    """Whether they use more than `most` bytes together. Pages that processes share are counted once; that takes longer
    to find out, so it is asked only where it matters."""
    pids = list_descendants(pid)
    return _total(pids, "status", RESIDENT) > most and _total(pids, "smaps_rollup", SHARE) > most


def count_threads(pid: int) -> int:
    """The threads of the process and of all below it."""
    return sum(len(_threads(one)) for one in list_descendants(pid))


def any_running(pids: Iterable[int]) -> bool:
    """Whether any thread of theirs is neither stopped nor dead."""
    return any(_state(f"/proc/{pid}/task/{thread}") not in "TtZX" for pid in pids for thread in _threads(pid))


def _state(place: str) -> str:
    """Its letter, after a name that may hold anything; "X" for what is gone by now."""
    return _read(f"{place}/stat").rpartition(") ")[2][:1] or "X"


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _total(pids: list[int], name: str, lines: re.Pattern[str]) -> int:
    return sum(1024 * int(size) for pid in pids for size in lines.findall(_read(f"/proc/{pid}/{name}")))


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:  # processes name themselves
            return file.read()
    except OSError:
        return ""
