"""Secrets: how keys are made, and how those that this process holds are kept from the agents it starts.

    hide("PROVIDER_KEY")              it stays in os.environ, for our own code to read
    Popen(..., env=visible())         but is not passed on, and /proc/PID/environ of this process does not show it

Left out: memory. A process of the same user may read ours where the system allows it (ptrace); agents that must not
need another user, a container or another machine. docs/guides/security.md says what follows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.config import Config

_hidden = {"STROP_KEY", "STROP_URL"}


def new_key() -> str:
    """A key that opens something. It never begins with "-", which commands would take for an option."""
    while (key := secrets.token_urlsafe(24)).startswith("-"):
        pass
    return key


def hide(*names: str) -> None:
    """From now on these variables are not passed on to processes that we start, and not shown by /proc."""
    _hidden.update(names)
    for name in names:
        if name in os.environ:
            os.environ[name] = os.environ[name]  # a copy, in memory that /proc does not show
    _blank(names)


def hide_keys(config: Config) -> None:
    """Hide the keys of outside models, which only the gateway needs, and the password of the store."""
    hide(*(outside.key_env for outside in config.gateway.outside.values() if outside.key_env))
    if config.store.url.startswith("postgres"):
        hide("PGPASSWORD")


def child_environment() -> dict[str, str]:
    """The environment for processes that we start."""
    return {name: value for name, value in os.environ.items() if name not in _hidden}


@contextmanager
def without_secrets() -> Generator[None]:
    """For agents inside this process: what is hidden is not in its environment until the end of the block."""
    taken = {name: os.environ.pop(name) for name in _hidden if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


def _blank(names: Iterable[str]) -> None:
    """/proc/PID/environ shows the memory in which the environment was handed to us, whatever was unset since then: the
    values are overwritten there. Without /proc there is nothing to be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end, see proc(5)
        at = start
        for entry in ctypes.string_at(start, end - start).split(b"\0"):
            name, _, value = entry.partition(b"=")
            if os.fsdecode(name) in names:
                ctypes.memset(at + len(name) + 1, 0, len(value))
            at += len(entry) + 1
