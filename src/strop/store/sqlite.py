"""The store in one SQLite file: everything a run on one machine knows.

Writes are committed in groups, reads have a thread of their own (`sqlite_writer`). One process writes at a time; others
may read the file while it does. WAL with synchronous=NORMAL survives kill -9 of any process, FULL also power loss.

Left out: waking waiters of other processes. `wait` and `lease(wait=...)` hear of changes made by their own process;
other processes reach the store over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Literal, TypeVar

from strop.errors import PlaceError, StoreError
from strop.files import private
from strop.store import schema, turns
from strop.store.sql import Operation, SqlStore
from strop.store.sqlite_writer import BUSY, SqliteReader, SqliteWriter, explain
from strop.types import Turn

T = TypeVar("T")
WORDS = {"SERIAL_KEY": "INTEGER PRIMARY KEY"}


class SqliteDb(sqlite3.Connection):
    """A connection as the verbs see it. There is one writer, so nothing needs locking."""

    lock = skip = ""
    changed = queued = False

    def alone(self, name: str, /) -> None:
        pass


class SqliteStore(SqlStore):
    """Open it with `await SqliteStore.open("run/store.sqlite")`."""

    def __init__(self, path: str, write: SqliteDb, read: SqliteDb, *, synced: bool) -> None:
        super().__init__()
        self.path = path
        self._db = write
        self._writer = SqliteWriter(write, path, self._notify, synced=synced)
        self._reader = SqliteReader(read, path, "strop-store-reader")

    @classmethod
    async def open(cls, path: str | Path, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> SqliteStore:
        """Open the store in file `path`, made with its folder if it is not there, migrated if it is older."""
        write, read = await asyncio.to_thread(_open, str(path), synchronous)
        return cls(str(path), write, read, synced=synchronous == "FULL")

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()  # the last one out tidies up, which a reader may not

    async def _write(self, operation: Operation[T]) -> T:
        return await self._writer.do(operation)

    async def _read(self, operation: Operation[T]) -> T:
        return await self._reader.do(operation)

    async def _look_up(self, operation: Operation[T]) -> T:
        return await self._reader.look_up(operation)

    async def turns(self, rollout: str, *, attempt: int | None = None) -> list[Turn]:
        """An attempt that begins has none: a look tells that at less cost than a way to the thread and back."""
        if not await self._look_up(lambda db: turns.are_any(db, rollout, attempt)):
            return []
        return await super().turns(rollout, attempt=attempt)

    def _notify(self) -> None:
        """After a commit, wherever it was made."""
        queued, changed = self._db.queued, self._db.changed
        self._db.queued = self._db.changed = False
        if queued:
            self._queued.fire()
        if changed:
            self._changed.fire()


def _open(path: str, synchronous: str) -> tuple[SqliteDb, SqliteDb]:
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PlaceError(f"cannot make the folder {folder}: {error.strerror}. Fix: choose another one") from None
    try:
        with contextlib.suppress(OSError):  # SQLite says it better
            open(path, "ab", opener=private).close()  # it holds keys; SQLite's files beside it get the same mode
        write = _connect(path, "rwc")
        try:
            write.execute("PRAGMA journal_mode = WAL")
            write.execute(f"PRAGMA synchronous = {synchronous}")
            if _bring_up_to_date(write, path):
                with contextlib.suppress(
                    sqlite3.Error
                ):  # another process reads it, or the disk is full: it stays large
                    write.execute("VACUUM")
            return write, _connect(path, "ro")
        except BaseException:
            write.close()
            raise
    except sqlite3.Error as error:
        raise explain(error, path) from None


def _connect(path: str, mode: str) -> SqliteDb:
    uri = f"{Path(path).absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False, factory=SqliteDb)


def is_outdated(path: Path) -> bool:
    """Whether opening the store at `path` would migrate it."""
    if not path.is_file():
        return False
    with contextlib.closing(_connect(str(path), "ro")) as db:
        try:
            return _read_version(db, str(path)) < schema.VERSION
        except sqlite3.DatabaseError:  # opening it says why
            return False


def _read_version(db: SqliteDb, path: str) -> int:
    row = db.execute("SELECT version FROM strop").fetchone()
    if row is None or not isinstance(row[0], int):
        raise StoreError(f"{path} does not say which version it has: it is damaged. Fix: put a copy back")
    return row[0]


def _bring_up_to_date(db: SqliteDb, path: str) -> bool:
    """Make the tables, or migrate them: all of it or nothing. Returns whether older ones were migrated."""
    db.execute("BEGIN IMMEDIATE")  # before looking: another process may be doing the same
    try:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "strop" not in tables:
            raise StoreError(f"{path} is a database of another program. Fix: choose another folder")
        version = _read_version(db, path) if tables else None
        scripts = schema.list_migrations(version, path)
        for script in scripts:
            schema.run(db, script, WORDS)
        db.execute("COMMIT")
        return bool(scripts) and version is not None
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
