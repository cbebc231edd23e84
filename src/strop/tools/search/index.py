"""An index: a folder that is there whole or not at all.

index.json       what it is; written last
documents.jsonl, offsets.npy, ids.npy, titles.npy, urls.npy   the passages (documents.py)
bm25/            scores of words (bm25.py), or
dense.faiss, probe.npy   vectors (dense.py)

It is built beside its place, in a hidden folder of the same disk, and renamed when everything is written. What a killed
build has left there is not an index, and the next build of that name begins by deleting it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from strop.errors import PlaceError
from strop.files import sync_folder, write_whole
from strop.tools.search import bm25, corpus, dense
from strop.tools.search.base import Progress, Searcher
from strop.tools.search.corpus import Passage
from strop.tools.search.dense import Dense, DenseSearch
from strop.tools.search.documents import Documents, Kind, Page, PassageWriter

FORMAT = 1


class About(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What index.json says. `dense` is how vectors are made; without it the index searches by words."""

    format: int
    passages: int
    dense: Dense | None = None


class ScoredPassage(Struct, frozen=True):
    """A passage as JSON, and its score."""

    document: msgspec.Raw
    score: float

    @property
    def passage(self) -> Passage:
        return msgspec.json.decode(self.document, type=Passage)


class Index:
    """An index that is open, to be read only. `search` of one by words may be called from many threads at once, of one
    by meaning from one at a time."""

    def __init__(self, path: Path, about: About) -> None:
        self.about, self.documents = about, Documents(path)
        self._searcher: Searcher
        if about.dense is None:
            self._searcher = bm25.Bm25(path)
        else:
            self._searcher = DenseSearch(path, self.documents, about.dense)

    @classmethod
    def open(cls, path: str | Path) -> Index:
        """Raises `PlaceError` if there is no index, and `ModelError` if its model cannot be had."""
        path = Path(path)
        try:
            about = msgspec.json.decode((path / "index.json").read_bytes(), type=About)
        except OSError:
            raise PlaceError(
                f"{path} holds no search index. Fix: make one with `strop search build CORPUS.jsonl {path}`"
            ) from None
        except msgspec.MsgspecError as error:
            raise PlaceError(f"{path}/index.json cannot be read ({error}). Fix: build the index again") from None
        if about.format != FORMAT:
            raise PlaceError(f"{path} was built by another strop (format {about.format}). Fix: build the index again")
        try:
            return cls(path, about)
        except (OSError, ValueError, KeyError, EOFError, RuntimeError) as error:
            raise PlaceError(f"the index in {path} is damaged ({error}). Fix: build it again") from None

    def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        """Per query the best passages, best first."""
        raw = self.documents.raw
        return [
            [ScoredPassage(raw(number), score) for number, score in hits]
            for hits in self._searcher.search(queries, topk)
        ]

    def page(self, kind: Kind, name: str) -> Page | None:
        return self.documents.page(kind, name)


def build(source: str | Path, place: str | Path, *, by: Dense | None = None, progress: Progress) -> About:
    """Make an index of a corpus, by words or, with `by`, by meaning. Raises `PlaceError` where something is there
    already, or for a corpus that cannot be read."""
    source, place = Path(source), Path(place)
    if not source.is_file():
        raise PlaceError(f"there is no corpus {source}. Fix: give a .jsonl file with one passage per line")
    with _build_folder(place) as folder:
        encoder = dense.load_encoder(by) if by else None  # before anything is read: it may not be there
        words = None if by else bm25.Builder(folder)
        writer = PassageWriter(folder, source)
        try:
            _copy(source, writer, words, progress)
            if not len(writer):
                raise PlaceError(f"{source} has no passages. Fix: write one per line")
            writer.close()
            if words is not None:
                words.close(progress)
        finally:
            writer.discard()
            if words is not None:
                words.discard()
        if by is not None and encoder is not None:
            dense.build(folder, Documents(folder), by, encoder, progress)
        about = About(format=FORMAT, passages=len(writer), dense=by)
        write_whole(folder / "index.json", msgspec.json.encode(about) + b"\n", shared=True)
    return about


def _copy(source: Path, writer: PassageWriter, words: bm25.Builder | None, progress: Progress) -> None:
    size = source.stat().st_size
    for line, done, passage in corpus.read(source):
        writer.add(passage, line)
        if words is not None:
            words.add(passage.contents)
        if len(writer) % 1000 == 0:
            progress("reading passages", done, size)
    progress("reading passages", size, size)


@contextmanager
def _build_folder(place: Path) -> Generator[Path]:
    """A folder to build in, which is `place` once the block has ended well, and is gone if it has not."""
    if os.path.lexists(place):
        raise PlaceError(f"{place} is there already. Fix: choose another place for the index, or delete it first")
    part = place.with_name(f".{place.name}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        held = os.open(part, os.O_RDONLY)
    except OSError as error:
        raise PlaceError(f"cannot write to {part.parent} ({error.strerror}). Fix: choose another place") from None
    try:
        _lock(held, place)
        for left in part.iterdir():  # by a build that was killed
            _remove(left)
        try:
            yield part
            sync_folder(part, whole=True)  # everything is on the disk before the name says that it is there
            part.rename(place)
        except OSError as error:
            why = error.strerror or error
            raise PlaceError(
                f"{place} cannot be written: {why}. Fix: free some space, or choose another place"
            ) from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(held)


def _lock(held: int, place: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise PlaceError(f"another process is building {place}. Fix: wait for it, or choose another place") from None


def _remove(left: Path) -> None:
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left)
    else:
        with contextlib.suppress(FileNotFoundError):
            left.unlink()
