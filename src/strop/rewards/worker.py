"""Work that may hang, blow up or eat the memory, done in a process that is kept for it.

    call("sql", ...) ──one line of JSON──▶ python -m strop.rewards.worker_main ──one line──▶ value
                                            └ ends itself when its time is over: then there is no line, and no harm

A signal cannot end a computation in a thread, nor one inside C code, and math libraries compute 9**9**9**9 if asked to.
The process has a timer whose signal ends it whatever it is at, and limits on memory and on the size of files; the next
call starts another one. It is kept between calls, since starting takes half a second, and ends with the process that
it was started by. Any thread may call; there are as many processes as there are calls at once, up to the machine's
cores.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from strop.errors import StropError
from strop.net.secrets import child_environment

_idle: list[subprocess.Popen[bytes]] = []
_room = threading.BoundedSemaphore(os.cpu_count() or 1)


def call(job: str, arguments: Sequence[Any], seconds: float) -> Any:
    """What the child's function `job` makes of plain data. TimeoutError if it took longer than `seconds`, or if the
    process did not survive it; StropError with the sentence that the child refused it with."""
    line = json.dumps([job, list(arguments), seconds]).encode() + b"\n"
    with _room:
        child = _take_process()
        if not (answer := _ask(child, line)).endswith(b"\n"):  # a line, and whole
            _end(child)
            raise TimeoutError(f"it took more than {seconds:g} s, or more memory than there is for it")
        _idle.append(child)
    value, refused = json.loads(answer)
    if refused is not None:
        raise StropError(refused)
    return value


def _take_process() -> subprocess.Popen[bytes]:
    """One that waits for work, or a new one."""
    while True:
        try:
            child = _idle.pop()
        except IndexError:
            return _start_process()
        if child.poll() is None:
            return child
        _close(child)


def _start_process() -> subprocess.Popen[bytes]:
    here = [place for place in sys.path if place]  # the agent's process may have added to it
    environment = {**child_environment(), "PYTHONPATH": os.pathsep.join(here)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", "strop.rewards.worker_main"]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)


def _ask(child: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Its answer, or nothing if it ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    return child.stdout.readline()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    _close(child)


def _close(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


def _after_fork() -> None:
    """They belong to the parent: a child of its own must neither ask them nor keep them alive."""
    global _room
    for child in _idle:
        _close(child)
        child.returncode = 0
    _idle.clear()
    _room = threading.BoundedSemaphore(os.cpu_count() or 1)


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
