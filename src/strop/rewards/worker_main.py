"""The process that kept.py starts: it hears of one job at a time, and ends itself when that takes too long.

Its timers have no handlers: the signal ends the process even in the middle of a computation in C. What is counted is
its own time, since a busy machine makes no answer wrong; the time on the clock has a limit that is WALL times as long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from strop.imports import to_install

MEMORY = 2**31
"""Bytes of address space. What needs more gets a MemoryError, or SQLite's "out of memory"."""
FILES = 2**27
"""Bytes of one file: what SQLite sorts or keeps beside the memory goes into such files, which vanish with it."""
WALL = 10
LOADING = 60.0
"""Seconds that the imports of a job may take."""


def are_equal(answer: str, golden: str) -> bool:
    """Whether math-verify takes both for the same. Its own time limits are off: they are signals too, which this
    process does not need and which could not stop everything."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]

    def read(text: str) -> Any:
        text = " ".join(text.split())  # or only the last line would be read
        return parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore

    try:
        return bool(verify(read(golden), read(answer), timeout_seconds=None))
    except ValueError:  # such as a number of more digits than Python reads
        return False


def match(predicted: str, golden: str, database: str, seconds: float, most: int) -> tuple[float | None, str]:
    from strop.rewards.query import compare_queries

    return compare_queries(predicted, golden, database, seconds, most)


def run_query(query: str, database: str, seconds: float, most: int) -> tuple[list[str], list[list[str]], bool, str]:
    """The columns, the first rows, whether there are more, and why there are none of all this."""
    from strop.rewards.query import QueryRefused, read_rows

    try:
        return *read_rows(query, database, seconds, most), ""
    except QueryRefused as error:
        return [], [], False, str(error)


JOBS: dict[str, tuple[Callable[..., Any], str]] = {
    "equal": (are_equal, "math_verify"),
    "match": (match, ""),
    "rows": (run_query, ""),
}
MISSING = f"math_equal needs math-verify: {to_install('math_verify')}"


def main() -> None:
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who started it
    logging.disable()
    for which, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or this system has none
            resource.setrlimit(which, (most, most))
    for line in sys.stdin.buffer:
        job, arguments, seconds = json.loads(line)
        sys.stdout.buffer.write(json.dumps(run_job(job, arguments, seconds)).encode() + b"\n")
        sys.stdout.buffer.flush()


def run_job(job: str, arguments: list[Any], seconds: float) -> tuple[Any, str | None]:
    """What came of a job, and why it was refused if it was."""
    function, needs = JOBS[job]
    signal.setitimer(signal.ITIMER_REAL, LOADING)
    try:
        if needs:
            __import__(needs)
    except ImportError:
        return None, MISSING
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)
    try:
        return function(*arguments), None
    except (MemoryError, RecursionError) as error:
        raise SystemExit(1) from error  # it may have left things half done: the next job gets a new process
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
