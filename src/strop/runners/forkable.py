"""Whether a process may still be forked after it has imported something.

    before = look()
    import ...
    is_unchanged(before)     no: it has threads, open files or children now that copies of it would lack or share

Threads of libraries that end them for a fork, and start them again when they need them (numpy's do), do no harm: one
fork is tried to see that. Without /proc nothing can be seen, and the answer is no.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Surroundings(NamedTuple):
    """What a process has besides memory."""

    threads: int
    files: frozenset[str]
    has_children: bool


def look() -> Surroundings | None:
    try:
        threads, files = len(os.listdir("/proc/self/task")), frozenset(os.listdir("/proc/self/fd"))
    except OSError:
        return None
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return Surroundings(threads, files, False)
    return Surroundings(threads, files, True)


def is_unchanged(before: Surroundings | None) -> bool:
    if before is None or (now := look()) is None:
        return False
    if now.threads != before.threads and now._replace(threads=before.threads) == before:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        now = look()
    return now == before
