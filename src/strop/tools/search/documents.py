"""The passages of an index on disk, found by number, id, title or URL; none of them is in memory until it is asked for.

documents.jsonl   each passage as it is given out, one per line
offsets.npy       where each line begins, and where the last one ends
ids.npy, titles.npy, urls.npy   names as 64-bit hashes in order, and the passage of each beside

All of it is memory-mapped. What a hash leads to is compared with the name itself before it is believed.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from strop.errors import PlaceError
from strop.tools.search.corpus import Passage, split_title

Kind = Literal["ids", "titles", "urls"]
KINDS: tuple[Kind, ...] = ("ids", "titles", "urls")


class Page(Struct, frozen=True, kw_only=True):
    """All passages of a title, in the corpus' order. A passage without a title is a page by itself."""

    title: str
    text: str
    ids: list[str]


def normalise_name(name: str) -> str:
    """How names are compared.

    >>> normalise_name("  ED  Wood")
    'ed wood'
    """
    return " ".join(name.split()).casefold()


def list_names(passage: Passage) -> dict[Kind, str]:
    """What a passage is found by. Ids are compared letter by letter, the rest as a person would."""
    return {"ids": passage.id, "titles": normalise_name(passage.title), "urls": normalise_name(passage.url)}


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class PassageWriter:
    """Writes the passages of an index into a folder: `add` each, then `close`. Raises `PlaceError` for an id that was
    there before."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self._folder, self._corpus = folder, corpus
        self._file = (folder / "documents.jsonl").open("wb")
        self._offsets, self._lines = array("q", [0]), array("q")
        self._names = {kind: (array("Q"), array("Q")) for kind in KINDS}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, passage: Passage, line: int) -> None:
        number = len(self._lines)
        self._offsets.append(self._offsets[-1] + self._file.write(msgspec.json.encode(passage) + b"\n"))
        self._lines.append(line)
        for kind, name in list_names(passage).items():
            if name:
                hashes, numbers = self._names[kind]
                hashes.append(_hash(name))
                numbers.append(number)

    def close(self) -> None:
        self._file.close()
        np.save(self._folder / "offsets.npy", np.frombuffer(self._offsets, np.int64))
        for kind, (hashes, numbers) in self._names.items():
            found = np.array([hashes, numbers], np.uint64).reshape(2, -1)
            np.save(self._folder / f"{kind}.npy", found[:, np.argsort(found[0], kind="stable")])
        self._refuse_doubles()

    def discard(self) -> None:
        """Let go of the file, of a build that failed."""
        self._file.close()

    def _refuse_doubles(self) -> None:
        hashes, numbers = np.load(self._folder / "ids.npy", mmap_mode="r")
        (alike,) = np.nonzero(hashes[1:] == hashes[:-1])
        if not len(alike):
            return
        documents = Documents(self._folder)
        for at in alike:
            first, second = int(numbers[at]), int(numbers[at + 1])
            if (id := documents[first].id) == documents[second].id:
                lines = f"lines {self._lines[first]} and {self._lines[second]}"
                raise PlaceError(f"{self._corpus}, {lines}: both passages have the id {id!r}. Fix: give each its own")


class Documents:
    """The passages of an index, read only. Any number of threads may ask at once. Raises `ValueError` where a file is
    not as long as it was."""

    def __init__(self, folder: Path) -> None:
        with (folder / "documents.jsonl").open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets: np.ndarray[Any, Any] = np.load(folder / "offsets.npy", mmap_mode="r")
        if len(self._data) != self._offsets[-1]:
            raise ValueError(f"documents.jsonl has {len(self._data)} bytes, not {self._offsets[-1]}")
        self._names = {kind: np.load(folder / f"{kind}.npy", mmap_mode="r") for kind in KINDS}

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:
        return msgspec.json.decode(self.raw(number), type=Passage)

    def __iter__(self) -> Iterator[Passage]:
        return (self[number] for number in range(len(self)))

    def raw(self, number: int) -> msgspec.Raw:
        """A passage as JSON, as it lies on the disk."""
        return msgspec.Raw(self._data[int(self._offsets[number]) : int(self._offsets[number + 1]) - 1])

    def find(self, kind: Kind, name: str) -> list[int]:
        """Numbers of the passages of that name, in order."""
        name = name if kind == "ids" else normalise_name(name)
        hashes, numbers = self._names[kind]
        key = np.uint64(_hash(name))
        first, last = np.searchsorted(hashes, key), np.searchsorted(hashes, key, "right")
        return [int(number) for number in numbers[first:last] if list_names(self[int(number)])[kind] == name]

    def page(self, kind: Kind, name: str) -> Page | None:
        """The page that a title names, or that holds the passage of an id or URL. None if there is none."""
        found = self.find(kind, name) if name else []
        if not found:
            return None
        first = self[found[0]]
        numbers = self.find("titles", first.title) if first.title else found[:1]
        passages = [self[number] for number in numbers]
        text = "\n".join(split_title(passage.contents)[1] for passage in passages)
        return Page(title=first.title, text=text, ids=[passage.id for passage in passages])
