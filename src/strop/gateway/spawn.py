"""Starting a worker's process, on the owner's machine or where a host starts it for a far owner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.files import private
from strop.net.secrets import child_environment


def spawn_worker(
    entry: str, setup: bytes, files: Sequence[int], log: Path | str | None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The process begins with the function `entry` of worker.py, which gets the numbers of a file that has its `setup`
    and of these `files`."""
    given = os.memfd_create("strop-setup")
    with os.fdopen(os.dup(given), "wb") as file:
        file.write(setup)
    os.lseek(given, 0, os.SEEK_SET)
    passed = [given, *files]
    run = f"from strop.gateway.worker import {entry}; {entry}({', '.join(map(str, passed))})"
    try:
        with open(log or os.devnull, "ab", opener=private) as out:
            return subprocess.Popen(
                [sys.executable, "-c", run],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=child_environment() | dict(environment or {}),
                start_new_session=True,  # Ctrl-C in the terminal is the run's to handle
            )
    finally:
        os.close(given)
