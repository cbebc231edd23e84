"""How coroutines reach SQLite: long reads go through a thread of their own, writes are committed in groups.

    verb ──(operation, future)──▶ batch ──▶ BEGIN, operation, operation, ..., COMMIT ──▶ futures resolve

Many callers share one commit; a caller hears back only once its commit is done. When an operation fails, all of the
batch is undone and run again with a savepoint around each, so that the one that fails is undone alone: an operation may
run twice, but what it did the first time is gone. They run in the order they were put.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from strop.errors import PlaceError, StoreError, StropError, Unavailable

T = TypeVar("T")
Operation = Callable[[Any], T]
_Item = tuple[Operation[Any], "asyncio.Future[Any]"]

_Outcome = tuple["asyncio.Future[Any]", Any, Exception | None]

MAX_BATCH = 512
GATHER = 0.0005
"""Seconds the writer waits at most for callers that shared the last commit. They were all answered at once, so they are
likely on their way with the next operation, and one more commit costs more than the moment."""
COPY_EVERY = 256
"""Commits after which the log is copied into the database. The same pages change again and again: copied more rarely,
they are copied fewer times."""
BUSY = 60.0
"""Seconds to wait for a lock that another program holds on the file."""


class SqliteThread(ABC):
    """A connection with a thread of its own that runs what is put on its queue. Whoever uses the connection holds
    `_using`; outside the thread nobody waits for it, nor for locks of other programs."""

    def __init__(self, connection: sqlite3.Connection, path: str, name: str) -> None:
        self._connection = connection
        self._path = path
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = False
        self._lock = threading.Lock()
        self._using = threading.Lock()
        connection.execute("PRAGMA busy_timeout = 0")
        # A daemon, so that a program that never closes its store can still end.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def do(self, operation: Operation[T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:  # nothing may be put after the end mark
            if self._closing:
                raise Unavailable(f"the store {self._path} is closed. Fix: open it again")
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
            self._run([item for item in batch if item is not None])
        with self._using:
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
        return

    @abstractmethod
    def _run(self, batch: list[_Item]) -> None:
        """In the thread: do what is wanted, and tell those who wait."""

    @contextlib.contextmanager
    def _patiently(self) -> Generator[None]:
        """In the thread: the connection is its own, and locks of other programs are waited for."""
        with self._using:
            self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY)}")
            try:
                yield
            finally:
                self._connection.execute("PRAGMA busy_timeout = 0")

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, OverflowError):
            return StoreError(f"a number does not fit into {self._path}: {error}. Fix: give a smaller one")
        return explain(error, self._path) if isinstance(error, sqlite3.Error) else error


class SqliteReader(SqliteThread):
    """What is read in the thread does not hold up the event loop, but costs more for going there and back than a look
    at a few rows: `look_up` does those right here, unless the thread is at work or another program holds the file."""

    async def look_up(self, operation: Operation[T]) -> T:
        await asyncio.sleep(0)  # whoever looks again and again must leave others their turn
        if self._using.acquire(blocking=False):
            try:
                if not self._closing:
                    return self._view(operation)
            except Exception as raised:
                if not is_busy(raised):
                    raise self._explain(raised) from None
            finally:
                self._using.release()
        return await self.do(operation)

    def _view(self, operation: Operation[T]) -> T:
        """One view of the data for all statements of a read."""
        self._connection.execute("BEGIN")
        try:
            return operation(self._connection)
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _run(self, batch: list[_Item]) -> None:
        for operation, future in _wanted(batch):
            try:
                with self._patiently():
                    result, error = self._view(operation), None
            except Exception as raised:
                result, error = None, self._explain(raised)
            _settle([(future, result, error)])


class SqliteWriter(SqliteThread):
    """Group commit. `after_commit` is called each time something became durable.

    A commit that need not wait for the disk takes a fraction of a millisecond, less than handing it to a thread and
    back while both want Python's lock. So what came up in one turn of the event loop is committed at its end, right
    there. Whatever may take longer goes to the thread, and what comes after it queues up behind it: commits that are
    synced (`synced`), a file that another program holds, the log being copied into the database, other event loops.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: str, after_commit: Callable[[], None], *, synced: bool
    ) -> None:
        self._after_commit = after_commit
        self._synced = synced
        self._home: asyncio.AbstractEventLoop | None = None
        self._here: list[_Item] = []  # to be committed at the end of this turn of the loop
        self._there = 0  # how many are in the thread's hands
        self._commits = 0  # since the log was last copied
        self._shared = 1  # how many shared the last commit
        self._deadline = 0.0
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        super().__init__(connection, path, "strop-store-writer")

    async def do(self, operation: Operation[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closing:
                raise Unavailable(f"the store {self._path} is closed. Fix: open it again")
            if self._home is None or self._home.is_closed():
                self._home = loop
                self._hand_over(self._here)  # what the closed loop left will not be committed there any more
                self._here = []
            if self._synced or self._there or loop is not self._home:
                self._hand_over([(operation, future)])
            else:
                self._here.append((operation, future))
                if len(self._here) == 1:
                    self._deadline = time.monotonic() + GATHER
                    loop.call_soon(self._commit_here)
        return await future

    async def close(self) -> None:
        with self._lock:
            self._hand_over(self._here)
            self._here = []
        await super().close()

    def _hand_over(self, items: list[_Item]) -> None:
        self._there += len(items)
        for item in items:
            self._queue.put(item)

    def _commit_here(self) -> None:
        if len(self._here) < self._shared and time.monotonic() < self._deadline and self._home is not None:
            self._home.call_soon(self._commit_here)
            return
        with self._lock:
            batch, self._here = self._here, []
            self._shared = len(batch)
            if self._there or not self._using.acquire(blocking=False):
                return self._hand_over(batch)
        try:
            done = self._commit(batch, patient=False)
        finally:
            self._using.release()
        with self._lock:
            if not done:
                self._hand_over(batch)
            elif self._commits >= COPY_EVERY and not self._closing:
                self._hand_over([_nothing()])  # the thread copies the log when it has work

    def _gather(self) -> None:
        if self._shared > 1:
            deadline = time.monotonic() + GATHER
            while self._queue.qsize() + 1 < self._shared and time.monotonic() < deadline:
                time.sleep(GATHER / 10)

    def _run(self, batch: list[_Item]) -> None:
        """In the thread."""
        self._shared = len(batch)
        with self._patiently():
            self._commit(batch, patient=True)
            if self._commits >= COPY_EVERY:
                with contextlib.suppress(sqlite3.Error):  # a full disk: the log keeps everything, it is tried again
                    self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                    self._commits = 0
        with self._lock:
            self._there -= len(batch)

    def _commit(self, batch: list[_Item], *, patient: bool) -> bool:
        """Run and commit a batch, and tell everybody. False if another program holds the file: nothing was done."""
        wanted = _wanted(batch)
        if not wanted:
            return True
        try:
            outcomes = self._together(wanted) or self._each(wanted)
        except sqlite3.Error as raised:
            # The commit failed, or SQLite undid everything (a full disk does that): nobody's work is durable.
            if self._connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # it was undone already
                    self._connection.execute("ROLLBACK")
            if not patient and is_busy(raised):
                return False
            _settle([(future, None, self._explain(raised)) for _, future in wanted])
            return True
        self._commits += 1
        _settle(outcomes)
        self._after_commit()
        return True

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


def _wanted(batch: list[_Item]) -> list[_Item]:
    """A caller that has gone away before its turn wants nothing done any more."""
    return [item for item in batch if not item[1].cancelled()]


def _nothing() -> _Item:
    """Work for nobody."""
    nobody: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    nobody.cancel()
    return lambda _: None, nobody


def _settle(outcomes: list[_Outcome]) -> None:
    """Resolve futures in their own loops, with one wake-up per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
    here = asyncio._get_running_loop()
    for loop, mine in by_loop.items():
        if loop is here:
            _resolve(mine)
        else:
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


def is_busy(error: Exception) -> bool:
    """Whether another program holds the file."""
    return isinstance(error, sqlite3.Error) and (getattr(error, "sqlite_errorname", "") or "").startswith("SQLITE_BUSY")


def explain(error: sqlite3.Error, path: str) -> StropError:
    """What SQLite says, as a sentence with the fix in it."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return Unavailable(f"the disk that holds {path} is full. Fix: free some space, then resume the run")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Unavailable(f"another process holds {path} locked. Fix: end it, then try again")
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
        return PlaceError(
            f"cannot write {path}. Fix: check the permissions of the file and its folder, or choose another"
        )
    if name.startswith("SQLITE_NOTADB"):
        return StoreError(f"{path} is not a Strop store, or is damaged. Fix: move it away or choose another folder")
    if name.startswith("SQLITE_CORRUPT"):
        return StoreError(
            f"{path} is damaged ({error}). Fix: put a copy back, or save what can be with `sqlite3 {path} .recover`; "
            "the newest weights of its run can begin a new one (strop train --from RUN)"
        )
    if name.startswith("SQLITE_IOERR"):
        return Unavailable(f"reading or writing {path} failed ({name}). Fix: check the disk that holds it")
    return StoreError(f"the store {path} failed: {error}. Fix: check it with `sqlite3 {path} 'PRAGMA integrity_check'`")
