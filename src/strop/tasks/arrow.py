"""Rows of Arrow batches: parquet files, and what Hugging Face's `datasets` keeps.

A batch at a time becomes plain Python: lists and structs as lists and dicts; what JSON has no word for as text (bytes
in base64, decimals digit for digit, dates and times in ISO 8601). What cannot be written is named by its column.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from strop.errors import TaskError
from strop.imports import one_line, to_install
from strop.tasks.rows import Row, Rows

BATCH = 1024


def read_parquet(path: Path) -> Rows:
    pa, pq = (import_library(name, f"{path} needs pyarrow to be read") for name in ("pyarrow", "pyarrow.parquet"))
    path.open("rb").close()  # what is wrong with the path, in the system's own words
    try:
        with pq.ParquetFile(path) as file:
            yield from read_rows(file.iter_batches(BATCH), path.stem, str(path))
    except (OSError, pa.ArrowException) as error:
        message = " ".join(str(error).split()).rstrip(".")
        raise TaskError(f"cannot read {path}: {message}. Fix: write or download it again") from None


def import_library(name: str, why: str) -> Any:
    """A library that not everyone has, imported when it is needed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TaskError(f"{why}: {to_install(name.partition('.')[0])}") from None


def read_rows(batches: Iterable[Any], stem: str, where: str) -> Rows:
    """Rows, numbered from 1, of record batches or tables."""
    number = 0
    for batch in batches:
        for item in _items(batch, where):
            number += 1
            yield Row(f"{where}, row {number}", f"{stem}-{number}", item)


def _items(batch: Any, where: str) -> list[dict[str, Any]]:
    names: list[str] = batch.schema.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TaskError(f"{where}: two columns are called {twice!r}. Fix: give each its own name")
    try:
        return _plain(batch)
    except Exception:
        for name in names:
            try:
                _plain(batch.select([name]))
            except Exception as error:
                raise TaskError(
                    f"{where}: column {name!r} cannot be written as JSON ({one_line(error)}). Fix: "
                    "leave it out or make it text"
                ) from error
        raise


def _plain(batch: Any) -> list[dict[str, Any]]:
    return msgspec.to_builtins(batch.to_pylist(maps_as_pydicts="strict"), str_keys=True, enc_hook=_text)


def _text(value: Any) -> str:
    """Times with nanoseconds: pandas' own classes, where pandas is installed."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"it holds {type(value).__name__}")
