"""What is made once on this machine and kept: each in a folder that is there whole or not at all.

    folder = make_once("smollm2-135m", make)     make(part) fills an empty folder, the first time

The cache is $STROP_CACHE, else $XDG_CACHE_HOME/strop, else ~/.cache/strop. Anything in it may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from strop.errors import PlaceError
from strop.files import sync_folder


def find_root() -> Path:
    if given := os.environ.get("STROP_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "strop"


def place(key: str) -> Path:
    """Where something is, once it has been made."""
    return find_root() / "models" / key


def make_once(key: str, make: Callable[[Path], None]) -> Path:
    """The folder called `key`, made by `make` if nobody has. Of several processes one makes it and the others wait; of
    one that dies nothing is left but a part that the next one clears away."""
    folder = place(key)
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{key}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{key}.lock")):
            if folder.is_dir():  # while this process waited
                return folder
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                make(part)
                sync_folder(part, whole=True)  # what a rename makes visible must not be lost with the power
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise PlaceError(
            f"cannot keep {key} in {folder.parent} ({error.strerror or error}). Fix: free some space there, or "
            "choose another place with STROP_CACHE"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """The kernel lets go of it when the process dies."""
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
