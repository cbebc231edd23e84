"""Rows of one file: .jsonl and .csv here, .parquet in arrow.py.

A row that is wrong is named by its line. Text is UTF-8, with or without a byte order mark.

Left out: compressed files, and .json files that hold one list.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from strop.errors import TaskError
from strop.files import find_near
from strop.imports import one_line
from strop.tasks import arrow
from strop.tasks.rows import Row, Rows, find_lone_surrogate

KINDS = (".jsonl", ".csv", ".parquet")

LONGEST = 64 * 2**20
"""Most bytes of a line, and most characters of a cell. What is longer is a file of another kind, or a lost quote."""


def read(path: Path) -> Rows:
    """The rows of a file of one of KINDS, read as they are asked for."""
    readers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": arrow.read_parquet}
    try:
        yield from readers[path.suffix.lower()](path)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> TaskError:
    if isinstance(error, FileNotFoundError):
        fix = f"write {near}" if (near := find_near(path)) else "check the path"
    elif isinstance(error, PermissionError):
        fix = "allow this user to read it"
    else:
        fix = "check the path and the disk"
    return TaskError(f"cannot read {path}: {error.strerror or one_line(error)}. Fix: {fix}")


def _jsonl(path: Path) -> Rows:
    stem = path.stem
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            where = f"{path}, line {number}"
            if len(line) > LONGEST:
                raise TaskError(f"{where}: longer than {LONGEST >> 20} MiB. Fix: write one JSON object per line")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                item = msgspec.json.decode(line)
            except UnicodeDecodeError:
                raise _not_utf8(where) from None
            except (msgspec.DecodeError, RecursionError) as error:
                wrong = _half_a_character(line) or f"not valid JSON ({error}); write one JSON object per line"
                raise TaskError(f"{where}: {wrong}") from None
            yield Row(where, f"{stem}-{number}", item)


def _half_a_character(line: bytes) -> str | None:
    """Python's own reader takes what msgspec refuses, and so can tell where it is."""
    try:
        return find_lone_surrogate(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _csv(path: Path) -> Rows:
    stem, header = path.stem, list[str]()
    for number, cells in _csv_lines(path):
        where = f"{path}, line {number}"
        if not header:
            header = _header(cells, where)
        elif len(cells) == len(header):
            yield Row(where, f"{stem}-{number}", dict(zip(header, cells, strict=True)))
        else:
            raise TaskError(
                f"{where}: {len(cells)} values for {len(header)} columns. Fix: "
                "put text with commas or line breaks in double quotes"
            )


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Cells, with the line they begin on: quoted text may run over several. Empty lines are left out.

    Bytes that are not UTF-8 come through as surrogates, so that they can be named by their line.
    """
    before, number = csv.field_size_limit(LONGEST), 1
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            reader = csv.reader(text, strict=True)
            while (cells := next(reader, None)) is not None:
                "".join(cells).encode()
                if cells:
                    yield number, cells
                number = reader.line_num + 1
    except csv.Error as error:
        raise TaskError(
            f"{path}, line {number}: not valid CSV ({error}). Fix: close every double quote, "
            "and write one inside a text twice"
        ) from None
    except UnicodeEncodeError:
        raise _not_utf8(f"{path}, line {number}") from None
    finally:
        csv.field_size_limit(before)


def _header(cells: list[str], where: str) -> list[str]:
    if twice := next((name for name in cells if cells.count(name) > 1), None):
        raise TaskError(f"{where}: two columns are called {twice!r}. Fix: give each its own name")
    if len(cells) == 1 and any(mark in cells[0] for mark in ";\t"):
        raise TaskError(f"{where}: one column called {cells[0]!r}. Fix: separate columns by commas")
    return cells


def _not_utf8(where: str) -> TaskError:
    return TaskError(f"{where}: not UTF-8 text. Fix: save the file as UTF-8")
