"""The store in one schema of a PostgreSQL database: for runs on several machines, whose processes all open it.

    verb ──▶ a thread ──▶ a connection: BEGIN, the operation, NOTIFY if it changed something, COMMIT ──▶ the answer
    every process: one listener ◀──LISTEN── wakes those who wait here for what was committed anywhere

A server that is away for a while (`patience`) is waited for and the operation is said again: that its answer was lost
does not tell whether it was done, which is why every verb may be said twice.

Left out: poolers that give each transaction another connection (LISTEN and prepared statements need one that lasts).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import unquote

from strop.errors import PlaceError, StoreError, Unavailable
from strop.imports import to_install
from strop.store import rows, schema
from strop.store.sql import Operation, SqlStore
from strop.store.transitions import Db
from strop.types import Lease

try:
    import psycopg
    from psycopg import errors
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.types.string import StrDumperUnknown

    from strop.store.postgres_errors import explain, explain_unreachable, is_away, read_reason
except ImportError:
    raise StoreError(f"a store in PostgreSQL needs psycopg. Fix: {to_install('psycopg')}") from None

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

WRITE = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
READ = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

WORDS = {
    "SERIAL_KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "BLOB": "BYTEA",
    "WITHOUT ROWID": "",
    "TEXT": 'TEXT COLLATE "C"',  # sorted as Python sorts: rows are locked in that order
}
TABLES = frozenset(re.findall(r"CREATE TABLE (\w+)", schema.TABLES))

DEFAULTS: dict[str, Any] = {
    "application_name": "strop",
    "connect_timeout": 10,
    "keepalives_idle": 15,  # a server whose machine is gone is noticed within half a minute
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""What libpq is told unless the address says otherwise."""

COLLISIONS = 10
"""How often an operation is tried again that PostgreSQL undid in favour of another one."""

logging.getLogger("psycopg").addHandler(logging.NullHandler())  # it also logs errors that it raises


class PostgresAddress:
    """`postgresql://user:password@host:port/database?schema=run1`; `schema` is ours, everything else is libpq's.

    >>> there = PostgresAddress("postgresql://me:secret@db.example:5433/runs?sslmode=require&schema=run1")
    >>> str(there)
    'postgresql://db.example:5433/runs?schema=run1'
    >>> there.schema, there.libpq["sslmode"], there.libpq["password"]
    ('run1', 'require', 'secret')
    """

    def __init__(self, url: str) -> None:
        own = re.findall(r"[?&]schema=([^&]*)", url)
        self.schema = unquote(own[-1]) if own else "public"
        if not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,50}", self.schema):
            raise PlaceError(
                f"{self.schema!r} is not the name of a schema. Fix: 51 lower-case letters, digits, '_' at most, no pg_"
            )
        try:
            self.libpq: dict[str, Any] = DEFAULTS | conninfo_to_dict(re.sub(r"(?<=[?&])schema=[^&]*&?", "", url))
        except psycopg.Error:
            self.libpq = {}
        self._host, self._database = (str(self.libpq.get(name) or "") for name in ("host", "dbname"))
        self._port = str(self.libpq.get("port") or "5432")
        misread = "@" in self._host + self._database or not re.fullmatch(r"[0-9,]*", self._port)
        if not self.libpq or misread or not re.match("postgres(ql)?://", url):
            raise PlaceError(  # without showing it: what was taken for a port may be half of a password
                "the address of the store cannot be read. Fix: write postgresql://user:password@host:5432/database"
                "?schema=name, with %40, %2F, %3A and %3F for '@', '/', ':' and '?' in a password"
            )

    def __str__(self) -> str:
        return f"postgresql://{self._host}:{self._port}/{self._database}?schema={self.schema}"

    @property
    def channel(self) -> str:
        return f'"strop.{self.schema}"'

    def connect(self) -> Connection:
        connection = psycopg.connect(**self.libpq, client_encoding="utf8", autocommit=True)
        try:
            connection.adapters.register_dumper(str, Text)
            settings = {"search_path": f'"{self.schema}"', **SETTINGS}
            connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()).encode())
        except BaseException:
            connection.close()
            raise
        return connection


SETTINGS = {
    "synchronous_commit": "on",
    # What is asked has an index. What a planner makes of a table that was empty or quiet when it looked at it last
    # reads thousands of rows once the table is neither, until it looks again.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",  # compiling takes longer than anything that is asked
    # A process that is frozen, or a machine that is gone, in the middle of a transaction must not stop all others.
    "idle_in_transaction_session_timeout": "'10s'",
    "lock_timeout": "'20s'",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


class Text(StrDumperUnknown):
    """Text without the characters that PostgreSQL does not take."""

    def dump(self, obj: str) -> Any:
        return super().dump(rows.text(obj) or "")


class PostgresDb:
    """A connection inside a transaction, as the verbs see it."""

    lock = " FOR UPDATE"
    skip = " FOR UPDATE SKIP LOCKED"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.changed = self.queued = False

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> psycopg.Cursor[tuple[Any, ...]]:
        return self._connection.execute(_translate(sql), parameters, binary=True)

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> psycopg.Cursor[tuple[Any, ...]]:
        if len(parameters) == 1:
            return self.execute(sql, parameters[0])
        cursor = self._connection.cursor()
        cursor.executemany(_translate(sql), parameters)
        return cursor

    def alone(self, name: str) -> None:
        self.execute("SELECT pg_advisory_xact_lock(hashtext(current_schema()), hashtext(?))", (name,))


@functools.cache
def _translate(sql: str) -> bytes:
    """
    >>> _translate("SELECT 5 % 2 WHERE a = ?")
    b'SELECT 5 %% 2 WHERE a = %s'
    """
    return sql.replace("%", "%%").replace("?", "%s").encode()


class PostgresStore(SqlStore):
    """Open it with `await PostgresStore.open("postgresql://user@host:5432/database?schema=run1")`."""

    def __init__(self, address: PostgresAddress, size: int, patience: float) -> None:
        super().__init__()
        self._address = address
        self._patience = patience
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # at most one per thread
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="strop-store")
        self._listener = Listener(address, self._heard)

    @classmethod
    async def open(cls, url: str, size: int = 8, patience: float = 60.0) -> PostgresStore:
        """Open the store in a schema, made with its tables if it is not there, migrated if it is older.

        `size`: how many operations run at a time, each on a connection of its own; one more listens. `patience`: how
        many seconds a server that does not answer is waited for."""
        address = PostgresAddress(url)
        await asyncio.to_thread(_bring_up_to_date, address)
        return cls(address, size, patience)

    async def close(self) -> None:
        with self._lock:
            self._closing.set()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._threads.shutdown()
        self._listener.close()
        self._forget_idle()

    async def lease(
        self,
        runner: str,
        *,
        seconds: float,
        count: int = 1,
        wait: float = 0.0,
        token: str | None = None,
        rollout: str | None = None,
    ) -> list[Lease]:
        # With a token, so that what is said again after a lost answer takes nothing more.
        token = token or secrets.token_hex(8)
        return await super().lease(runner, seconds=seconds, count=count, wait=wait, token=token, rollout=rollout)

    async def _write(self, operation: Operation[T]) -> T:
        return await self._in_thread(WRITE, operation)

    async def _read(self, operation: Operation[T]) -> T:
        return await self._in_thread(READ, operation)

    async def _in_thread(self, begin: bytes, operation: Operation[T]) -> T:
        deadline = time.monotonic() + self._patience
        with self._lock:  # nothing may be put after the end
            if self._closing.is_set():
                raise Unavailable(f"the store {self._address} is closed. Fix: open it again")
            done = self._threads.submit(self._do, begin, operation, deadline)
        return await asyncio.wrap_future(done)

    def _do(self, begin: bytes, operation: Operation[T], deadline: float) -> T:
        """Until it is done, or cannot be done, or the server has been away for too long."""
        pause, collisions = 0.05, 0
        while True:
            try:
                return self._once(begin, operation)
            except (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable) as error:
                collisions += 1
                if collisions > COLLISIONS:
                    raise explain(error, str(self._address)) from None
            except psycopg.Error as error:
                if not is_away(error):
                    raise explain(error, str(self._address)) from None
                self._forget_idle()  # they were lost with it
                if self._closing.is_set() or time.monotonic() + pause > deadline:
                    raise Unavailable(
                        f"PostgreSQL at {self._address} does not answer ({read_reason(error)}). "
                        "Fix: start the server again, then resume the run"
                    ) from None
                self._closing.wait(pause)
                pause = min(2 * pause, 1.0)

    def _once(self, begin: bytes, operation: Operation[T]) -> T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._address.connect()
        try:
            return _transaction(connection, begin, operation, self._address.channel)
        finally:
            if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def _forget_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _heard(self, words: set[str]) -> None:
        """In the listener's thread."""
        if "queued" in words:
            self._queued.fire()
        if "changed" in words:
            self._changed.fire()


def _transaction(connection: Connection, begin: bytes, operation: Operation[T], channel: str) -> T:
    """All of it or nothing. What it changed is told with the commit, at one go."""
    connection.execute(begin)
    try:
        db = PostgresDb(connection)
        result = operation(db)
        words = " ".join(word for word, said in (("changed", db.changed), ("queued", db.queued)) if said)
        connection.execute(f"NOTIFY {channel}, '{words}'; COMMIT".encode() if words else b"COMMIT")
    except BaseException:
        with contextlib.suppress(psycopg.Error):
            connection.rollback()
        raise
    return result


class Listener:
    """A thread with a connection of its own that hears what was committed, here and in other processes."""

    def __init__(self, address: PostgresAddress, heard: Callable[[set[str]], None]) -> None:
        self._address = address
        self._heard = heard
        self._closing = threading.Event()
        self._woken, self._wake = socket.socketpair()
        # A daemon, so that a program that never closes its store can still end.
        self._thread = threading.Thread(target=self._serve, name="strop-store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._wake.close()
        self._thread.join()
        self._woken.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._address.connect()) as connection:
                    connection.execute(f"LISTEN {self._address.channel}".encode())
                    self._heard({"changed", "queued"})  # while nobody listened something may have been missed
                    self._hear(connection)
            except psycopg.Error:
                self._closing.wait(0.5)

    def _hear(self, connection: Connection) -> None:
        with selectors.DefaultSelector() as either:
            either.register(connection, selectors.EVENT_READ)
            either.register(self._woken, selectors.EVENT_READ)
            while not self._closing.is_set():
                either.select()
                said = [notify.payload for notify in connection.notifies(timeout=0)]
                self._heard({word for payload in said for word in payload.split()})


def _bring_up_to_date(address: PostgresAddress) -> None:
    """Make the schema and its tables, or migrate them: all of it or nothing."""
    where = str(address)

    def update(db: Db) -> None:
        db.execute("SELECT pg_advisory_xact_lock(hashtext('strop'), hashtext(?))", (address.schema,))
        if not db.execute("SELECT 1 FROM pg_namespace WHERE nspname = ?", (address.schema,)).fetchone():
            db.execute(f'CREATE SCHEMA "{address.schema}"')
        found = db.execute("SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()").fetchall()
        tables = {name for (name,) in found}
        version: int | None = None
        if tables & TABLES:
            try:
                (version,) = db.execute("SELECT version FROM strop").fetchone()
            except (errors.UndefinedTable, errors.UndefinedColumn, TypeError):  # TypeError: it has no row
                raise StoreError(
                    f"{where} holds tables of another program. Fix: choose another schema, with ?schema=NAME"
                ) from None
        # Between two statements of a migration whole conversations are compared.
        db.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        for script in schema.list_migrations(version, where):
            schema.run(db, script, WORDS)

    try:
        connection = address.connect()
    except psycopg.Error as error:
        raise explain_unreachable(error, where) from None
    try:
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise PlaceError(f"the database of {where} is encoded in {encoding}. Fix: make one with ENCODING 'UTF8'")
        _transaction(connection, WRITE, update, address.channel)
    except psycopg.Error as error:
        raise (explain_unreachable if is_away(error) else explain)(error, where) from None
    finally:
        connection.close()
