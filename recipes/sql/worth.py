"""What a query is worth beside the golden one: 1 if it gives the same. Short of that, 0.1 if it gives anything, and up
to 0.4 more for reading the tables and columns that the golden one reads."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from strop.rewards import sql_match
from strop.tools.sql import run_query

GIVES, READS = 0.1, 0.4


def worth(query: str, golden: str, database: str) -> float:
    if sql_match(query, golden, database):
        return 1.0
    if not run_query(query, database, rows=1).ok:
        return 0.0
    read, needed = columns(query, database), columns(golden, database)
    return GIVES + READS * 2 * len(read & needed) / max(1, len(read) + len(needed))


def columns(query: str, database: str) -> set[tuple[str, str]]:
    """The tables that a query reads, as (table, ""), and their columns. SQLite says so when it translates the query,
    which is not run."""
    found: set[tuple[str, str]] = set()

    def seen(action: int, table: str | None, column: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_READ:
            name = (table or "").lower()
            found.update([(name, ""), (name, (column or "").lower())])
        return sqlite3.SQLITE_OK

    with closing(sqlite3.connect(f"{Path(database).as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        db.set_authorizer(seen)
        with suppress(sqlite3.Error):
            db.execute(f"EXPLAIN {query}")
    return found
