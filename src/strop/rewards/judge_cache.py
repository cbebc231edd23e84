"""What a judge said before, so that nobody asks twice, and how often it was asked.

A SQLite file that any number of processes may share; without one it is remembered as long as the process lives. The
first answer to a prompt stays: everyone who asks again gets the same.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from strop.errors import PlaceError

PATIENCE = 30.0
"""Seconds to wait for others who write."""


class JudgeCache:
    """The answers in the file `path`, or those of this process."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path).absolute()
        self._here: dict[str, str] = {}
        self._calls = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        if self._path is None:
            return self._here.get(key)
        with self._open() as db:
            found = db.execute("SELECT said FROM answers WHERE key = ?", (key,)).fetchone()
        return found[0] if found else None

    def put(self, key: str, said: str) -> None:
        if self._path is None:
            self._here.setdefault(key, said)
            return
        with self._open() as db:
            db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, said))

    def spend(self, most: int | None) -> bool:
        """Count one call, unless that would be more than `most` of all that ever were."""
        if self._path is None:
            with self._lock:
                fine = most is None or self._calls < most
                self._calls += fine
                return fine
        with self._open() as db:
            limit = 2**62 if most is None else most
            return db.execute("UPDATE calls SET number = number + 1 WHERE number < ?", (limit,)).rowcount > 0

    @contextmanager
    def _open(self) -> Generator[sqlite3.Connection]:
        """A connection for one statement: it costs little beside a judge, and no fork or thread can spoil it."""
        assert self._path is not None
        try:
            with closing(sqlite3.connect(self._path, timeout=PATIENCE, isolation_level=None)) as db:
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'calls'").fetchone():
                    db.executescript(
                        "BEGIN IMMEDIATE;"
                        "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, said TEXT NOT NULL);"
                        "CREATE TABLE IF NOT EXISTS calls (number INTEGER NOT NULL);"
                        "INSERT INTO calls SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM calls);"
                        "COMMIT;"
                    )
                yield db
        except sqlite3.Error as error:
            raise PlaceError(
                f"the judge's cache {self._path} cannot be used ({error}). Fix: choose another file"
            ) from None


def make_key(server: str, model: str, messages: Any, options: Any) -> str:
    """What an answer is remembered by: everything that it depends on."""
    asked = json.dumps([server, model, messages, options], sort_keys=True, default=str)
    return hashlib.blake2b(asked.encode(errors="replace"), digest_size=16).hexdigest()
