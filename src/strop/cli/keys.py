"""The run's key for commands that need one: from a file, from stdin or from the environment. Never as an argument,
which everybody who lists the machine's processes could read."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.store.wire import check_key


def add(command: argparse.ArgumentParser, default: str = "$STROP_KEY") -> None:
    command.add_argument("--key-file", metavar="FILE", help=f"holds the run key, - for stdin (default: {default})")
    command.add_argument("--key", action=_Refused, help=argparse.SUPPRESS)


class _Refused(argparse.Action):
    """What people may have written in their scripts before."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(
            "--key shows the key to everybody who lists processes: write it into a file and give --key-file FILE "
            "(- for stdin), or export STROP_KEY"
        )


def read_key(arguments: argparse.Namespace) -> str | None:
    name = arguments.key_file
    if name is None:
        return os.environ.get("STROP_KEY")
    try:
        found = sys.stdin.readline() if name == "-" else Path(name).expanduser().read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read --key-file {name}: {error.strerror}. Fix: check the path") from None
    if not found.strip():
        raise ConfigError(f"--key-file {name} holds no key. Fix: write it into the first line")
    try:
        return check_key(found.strip())
    except ConfigError as error:
        raise ConfigError(f"--key-file {name} does not hold a key: {error}") from None
