"""Starting the process that holds the weights, at once or ahead of time.

    start_ahead(config, ...)   a command calls this once its settings are read; the process begins to import torch
    take(log)                  a `Launcher` has it from here on, or a fresh one where none was started
    discard()                  what nobody took, ends

Importing torch and transformers takes the process two seconds, which are most of the time from a command to its first
token: it begins with that while the command still imports, reads tasks and opens its store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from strop.config import Config, answers_outside
from strop.engines.registry import engine_class
from strop.files import private
from strop.learner.compile_cache import compile_environment
from strop.net.secrets import child_environment, hide_keys

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that every glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Has glibc keep up to a GiB of freed memory: giving it back after every operation, only to have it filled with zeros
again for the next one, took a quarter of the time of a decode step."""

WAIT_SHORTLY = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""Has idle threads look for work for some tenths of a millisecond, then sleep. A decode step is a thousand short
operations: waking sleepers for each took half as long again as the step, and threads that never sleep take the cores
from everybody else."""

LOG = "log"
"""The message that tells a process which was started ahead where to write what it prints."""

BEGIN = "import gc; gc.disable(); from strop.learner.child import serve; serve({fd})"
"""The collector looks at a million objects again and again while modules are imported, a quarter of the time, and finds
nothing. `serve` has it go on afterwards."""

Child = tuple["subprocess.Popen[bytes]", Connection]
_ahead: list[Child] = []


def start_ahead(config: Config, *, train: bool) -> None:
    """Start the process now, which the first `LearnerProcess` of this command will be, if the command needs one: to
    train, or since the embedded engine serves."""
    if answers_outside(config) or not (train or engine_class(config.engine).shares_weights):
        return
    if train and config.cluster.address:  # it is started on another machine
        return
    hide_keys(config)
    with open(os.devnull, "ab") as out:
        _ahead.append(_spawn(out.fileno()))


def take(log: Path) -> Child:
    """A process of one's own, whose output goes to `log`."""
    with open(log, "ab", opener=private) as out:
        while _ahead:
            process, connection = _ahead.pop()
            with contextlib.suppress(OSError):  # it died meanwhile: a fresh one will say why
                connection.send((LOG, os.path.abspath(log)))
                return process, connection
            _end(process, connection)
        return _spawn(out.fileno())


def discard() -> None:
    """End what was started ahead and not taken."""
    while _ahead:
        _end(*_ahead.pop())


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def _spawn(out: int) -> Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_with(theirs, out)
    return process, Connection(ours.detach())


def spawn_with(
    theirs: socket.socket, out: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The process, whose end of its connection is `theirs`. What it prints goes to the file `out`."""
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(fd=theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env={
            "TOKENIZERS_PARALLELISM": "false",
            **WAIT_SHORTLY,
            **KEEP_MEMORY,
            **compile_environment(),
            **(environment or {}),
            **child_environment(),
        },
        start_new_session=True,  # Ctrl-C in the terminal is the run's to handle
    )
