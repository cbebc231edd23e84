"""A folder of files that are named by split.

    gsm8k/train.jsonl                           split train
    gsm8k/test.parquet                          split test
    dapo/data/train-00000-of-00002.parquet      split train, first part
    dapo/data/train-00001-of-00002.parquet      split train, second part

Files lie in the folder or one folder down. All of a split lie together and are of one kind: two folders with a `train`
each are two data sets, and one in two formats would count every task twice. Other files are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from strop.errors import TaskError
from strop.tasks import files, hub
from strop.tasks.rows import Rows, Sources

_PART = re.compile(r"(?P<split>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(-[0-9a-f]{16})?")


def read(folder: Path) -> Sources:
    """The rows of every split of a folder."""
    try:
        if hub.is_saved(folder):
            return hub.from_disk(folder)
        paths = sorted(_files(folder))
    except OSError as error:
        raise files.unreadable(folder, error) from None
    if not paths:
        raise TaskError(
            f"{folder} holds no tasks: looked there and one folder down for files named by split, such as train.jsonl, "
            "test.csv or validation-00000-of-00002.parquet, and for what datasets' save_to_disk writes"
        )
    splits: dict[str, list[Path]] = {}
    for path in paths:
        part = _PART.fullmatch(path.stem)
        splits.setdefault(part["split"] if part else path.stem, []).append(path)
    return {split: _rows(split, paths) for split, paths in splits.items()}


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        inside = path.iterdir() if path.is_dir() and not path.name.startswith(".") else [path]
        yield from (
            file
            for file in inside
            if file.suffix.lower() in files.KINDS and file.is_file() and not file.name.startswith(".")
        )


def _rows(split: str, paths: Sequence[Path]) -> Rows:
    """The rows of one split. Those of parts are counted over all of them, so that ids do not depend on the cut."""
    found = [_PART.fullmatch(path.stem) for path in paths]
    if found[0] is None and len(paths) == 1:
        yield from files.read(paths[0])
        return
    _check_together(split, paths)
    parts = [(int(part["part"]), int(part["parts"])) for part in found if part]
    first, num_parts = (min(parts[0][0], 1), parts[0][1]) if parts else (0, 1)  # most count from 0, some from 1
    if parts != [(first + part, len(paths)) for part in range(len(paths))]:
        raise TaskError(
            f"the split {split!r} has {len(paths)} of {num_parts} files, {paths[0]} and so on. Fix: "
            "download what is missing, or remove what does not belong to it"
        )
    number = 0
    for path in paths:
        for row in files.read(path):
            number += 1
            yield row._replace(id=f"{split}-{number}")


def _check_together(split: str, paths: Sequence[Path]) -> None:
    for path in paths[1:]:
        if path.parent != paths[0].parent:
            raise TaskError(
                f"{paths[0]} and {path} are both of the split {split!r}. Fix: give the folder that you mean of the two"
            )
        if path.suffix.lower() != paths[0].suffix.lower():
            raise TaskError(f"{paths[0]} and {path} are both of the split {split!r}. Fix: keep one of them")
