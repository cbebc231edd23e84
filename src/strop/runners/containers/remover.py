"""Removes the containers of a runner that is gone.

    runner ──"+name", "-name", over a pipe──▶ this process ──at the end of the pipe──▶ docker rm --force name

Run by path and isolated (-I): nothing of strop is imported, so that it starts at once and stays small.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable

TRIES = 3
"""An engine may still be making a container whose client was killed: it is removed once more a moment later."""
PAUSE = 1.0
REMOVE_SECONDS = 30.0


def begin(client: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The process that waits for our death, in a session of its own: what ends ours does not end it."""
    return subprocess.Popen(
        [sys.executable, "-I", __file__, client],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )


def remove(client: str, names: Iterable[str]) -> None:
    """Kill and remove them, whether they run, are being made, or are gone."""
    try:
        subprocess.run(
            [client, "rm", "--force", *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=REMOVE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # nobody is left to be told


def wait_for_end(client: str, lines: Iterable[str]) -> None:
    names: dict[str, None] = {}
    for line in lines:
        name = line[1:].strip()
        if line[0] == "+":
            names[name] = None
        else:
            names.pop(name, None)
    for number in range(TRIES if names else 0):
        if number:
            time.sleep(PAUSE)
        remove(client, names)


if __name__ == "__main__":
    wait_for_end(sys.argv[1], sys.stdin)
