"""Folders and files that only their owner may open. A run's store holds the keys of attempts at work: who can read
them can speak for an agent and give it rewards.

    private_folder(Path("runs/mine"))            made, or closed to others if it was open to them
    with open(path, "ab", opener=private): ...   a file that is made as its owner's only
"""

from __future__ import annotations

import difflib
import logging
import os
import stat
from pathlib import Path

LOG = logging.getLogger("strop.files")
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def find_near(path: Path, *, folders: bool = False) -> Path | None:
    """What is there and spelt most like a path that is not, in every part of it; `folders` only, or anything."""
    try:
        parent = path.parent if path == path.parent or path.parent.is_dir() else find_near(path.parent, folders=True)
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir() or not folders] if parent else []
    except (OSError, ValueError):  # not ours to read, or not the name of any file
        return None
    found = [path.name] if path.name in names else difflib.get_close_matches(path.name, names, 1)
    return parent / found[0] if parent and found else None


def private_folder(folder: Path) -> None:
    """Make the folder. One that is there already is closed to others, and so are the files in it; only a folder where
    everybody may put things (/tmp) stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not folder.stat().st_mode & stat.S_ISVTX:
        close_to_others(folder)
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False):
                close_to_others(Path(entry.path))


def private(path: str, flags: int) -> int:
    """For `open(..., opener=private)`. A file that is there already is closed to others."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    close_to_others(Path(path))
    return descriptor


def close_to_others(path: Path) -> None:
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or not mode & OTHERS:
        return
    try:
        path.chmod(stat.S_IMODE(mode) & ~OTHERS)
    except OSError as error:  # somebody else's, or a disk that knows no owners
        LOG.warning(
            "others can open %s, and that cannot be changed (%s): keep it where only you can look", path, error.strerror
        )


def sync_folder(folder: Path, *, whole: bool = False) -> None:
    """Returns once the disk has the names of what lies in the folder; if `whole`, with all that is in it."""
    for path in (*(sorted(folder.rglob("*")) if whole else ()), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Write a file so that a reader finds all of it or what was there before. Others may read it if it is `shared`."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb", opener=None if shared else private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
