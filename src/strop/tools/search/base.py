"""What both kinds of search share: hits, progress, and a sentence for a library that is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from strop.errors import ConfigError
from strop.imports import to_install

Hit = tuple[int, float]
"""A passage's number in the corpus, and its score."""
Hits = list[Hit]
Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


class Searcher(Protocol):
    def search(self, queries: Sequence[str], topk: int) -> list[Hits]: ...


def import_optional(library: str) -> Any:
    """An optional library, or `ConfigError` with the way to get it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(f"this index needs {library} ({error}): {to_install(library)}") from None
