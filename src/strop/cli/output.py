"""What the commands print with: tables that fit, JSON for machines, and how this program was called."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from strop.monitor.screen import Screen
from strop.printable import escape_json
from strop.types import Rollout

MODELS = "strop/nano, smollm2-135m, a folder or ORG/MODEL of Hugging Face, or a .gguf file"
HOSTS = "another name that clients may call this server by, such as a proxy's; may be given again"


def make_console() -> Screen:
    """Tables fit the terminal; into a pipe they are as wide as they like, so that no id is cut."""
    return Screen(highlight=False) if sys.stdout.isatty() else Screen(width=1000, highlight=False)


def print_json(value: Any) -> None:
    """One JSON object per line, said at once: somebody may be reading along."""
    sys.stdout.write(escape_json(msgspec.json.encode(value).decode()) + "\n")
    sys.stdout.flush()


def get_program() -> str:
    """How this command was called, for sentences that tell what to type next."""
    called = sys.argv[0]
    return "strop" if Path(called).name != "strop" or shutil.which("strop") == called else called


def format_status(rollout: Rollout) -> Text:
    style = {"succeeded": "green", "failed": "red", "cancelled": "yellow"}.get(rollout.status, "")
    return Text(rollout.status, style=style)


def find_last_line(text: str | None) -> str:
    """What an error says, without the traceback above it."""
    return (text or "").strip().rpartition("\n")[2]


def hide_password(url: str) -> str:
    """
    >>> hide_password("postgresql://me:secret@host/db")
    'postgresql://me@host/db'
    """
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1@", url)


def format_counts(counts: Mapping[str, int]) -> str:
    """Leased and succeeded first, then what went wrong."""
    first = [name for name in ("leased", "succeeded") if name in counts]
    names = [*first, *sorted(counts.keys() - set(first))]
    return " · ".join(f"{name} {counts[name]}" for name in names)
