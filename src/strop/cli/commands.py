"""What a command's module is handed to add itself to."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
"""All commands of `strop`: `commands.add_parser(name, ...)` adds one."""
