"""Two threads around SQLite: one writes with group commit, one reads. Callers await futures of their own loops.

    verb ──(operation, future)──▶ queue ──▶ writer: BEGIN, operation, operation, ..., COMMIT ──▶ futures resolve

Many callers share one commit, which is what costs; a caller hears back only once its commit is done. When an operation
fails, all of the batch is undone and run again with a savepoint around each, so that the one that fails is undone
alone: an operation may run twice, but what it did the first time is gone. They run in the order they were put.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from strop.errors import PlaceError, StoreError, StropError

T = TypeVar("T")
Operation = Callable[[Any], T]
_Item = tuple[Operation[Any], "asyncio.Future[Any]"]

_Outcome = tuple["asyncio.Future[Any]", Any, Exception | None]

MAX_BATCH = 512
GATHER = 0.0005
"""Seconds the writer waits at most for callers that shared the last commit. They were all answered at once, so they are
likely on their way with the next operation, and one more commit costs more than the moment."""
WAL_PAGES = 4000
"""How long the log grows before it is copied into the database (16 MiB). The same pages change again and again: copied
more rarely, they are copied fewer times."""


class Unavailable(StoreError):
    """The store cannot be reached or cannot write now. Nothing is wrong with what was asked: asking again may help."""


class SqliteThread:
    """A connection with a thread of its own that runs what is put on its queue."""

    def __init__(self, connection: sqlite3.Connection, path: str, name: str) -> None:
        self._connection = connection
        self._path = path
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = False
        self._lock = threading.Lock()
        # A daemon, so that a program that never closes its store can still end.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def do(self, operation: Operation[T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:  # nothing may be put behind the end mark
            if self._closing:
                raise Unavailable(f"the store {self._path} is closed: open it again")
            self._queue.put((operation, future))
        return await future

    async def close(self) -> None:
        """Finish what is queued, then close the connection."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        more = True
        while more:
            batch = self._take()
            more = batch[-1] is not None
            # A caller that has gone away before its turn wants nothing done any more.
            self._run([item for item in batch if item is not None and not item[1].cancelled()])
        self._connection.close()

    def _take(self) -> list[_Item | None]:
        """Wait for an item, then take all that are there. None, the end mark, can only be the last."""
        batch = [self._queue.get()]
        self._gather()
        while batch[-1] is not None and len(batch) < MAX_BATCH:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _gather(self) -> None:
        """Called when there is work: whether to wait for more of it."""

    def _run(self, batch: list[_Item]) -> None:
        for operation, future in batch:
            try:
                self._connection.execute("BEGIN")  # one view of the data for all statements of a read
                result, error = operation(self._connection), None
            except Exception as raised:
                result, error = None, self._explain(raised)
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            _settle([(future, result, error)])

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, OverflowError):
            return StoreError(f"a number does not fit into {self._path}: {error}")
        return explain(error, self._path) if isinstance(error, sqlite3.Error) else error


class Writer(SqliteThread):
    """Group commit. `after_commit` is called in the writer's thread each time something became durable."""

    def __init__(self, connection: sqlite3.Connection, path: str, after_commit: Callable[[], None]) -> None:
        self._after_commit = after_commit
        self._shared = 1  # how many shared the last commit
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        super().__init__(connection, path, "strop-store-writer")

    def _gather(self) -> None:
        if self._shared > 1:
            deadline = time.monotonic() + GATHER
            while self._queue.qsize() + 1 < self._shared and time.monotonic() < deadline:
                time.sleep(GATHER / 10)

    def _run(self, batch: list[_Item]) -> None:
        self._shared = len(batch)
        if not batch:
            return
        connection = self._connection
        try:
            outcomes = self._together(batch) or self._each(batch)
        except sqlite3.Error as raised:
            # The commit failed, or SQLite undid everything (a full disk does that): nobody's work is durable.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            _settle([(future, None, self._explain(raised)) for _, future in batch])
            return
        _settle(outcomes)
        self._after_commit()

    def _together(self, batch: list[_Item]) -> list[_Outcome] | None:
        """The whole batch as one, or nothing of it if an operation fails."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            outcomes: list[_Outcome] = [(future, operation(connection), None) for operation, future in batch]
        except Exception:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return None
        connection.execute("COMMIT")
        return outcomes

    def _each(self, batch: list[_Item]) -> list[_Outcome]:
        """The batch with a savepoint around each operation, which costs two statements more for each."""
        self._connection.execute("BEGIN IMMEDIATE")
        outcomes: list[_Outcome] = [(future, *self._one(operation)) for operation, future in batch]
        self._connection.execute("COMMIT")
        return outcomes

    def _one(self, operation: Operation[Any]) -> tuple[Any, Exception | None]:
        connection = self._connection
        connection.execute("SAVEPOINT one")
        try:
            result = operation(connection)
        except Exception as raised:
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
            return None, self._explain(raised)
        connection.execute("RELEASE one")
        return result, None


def _settle(outcomes: list[_Outcome]) -> None:
    """Resolve futures in their own loops, with one wake-up per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
    for loop, mine in by_loop.items():
        call_in(loop, lambda mine=mine: _resolve(mine))


def _resolve(outcomes: list[_Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to hear it
        loop.call_soon_threadsafe(callback)


def explain(error: sqlite3.Error, path: str) -> StropError:
    """What SQLite says, as a sentence with the fix in it."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return Unavailable(f"the disk that holds {path} is full: free some space, then resume the run")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Unavailable(f"another process holds {path} locked: end it, then try again")
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
        return PlaceError(f"cannot write {path}: check the permissions of the file and its folder, or choose another")
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return StoreError(f"{path} is not a Strop store, or is damaged: move it away or choose another folder")
    if name.startswith("SQLITE_IOERR"):
        return Unavailable(f"reading or writing {path} failed ({name}): check the disk that holds it")
    return StoreError(f"the store {path} failed: {error}")
