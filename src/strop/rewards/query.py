"""Queries that may do nothing but read, and their results compared. It runs in the process of child.py.

sql.py says what counts as the same.
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

Row = tuple[Any, ...]
T = TypeVar("T")

READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
REFUSED = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
LONGEST = 10**6
"""Bytes of one value or of a query."""
MOST = 5 * 10**7
"""Bytes of a whole result, roughly."""
NOISE = 1e-12
"""By how much of their size numbers may differ that were added up in another order, and are the same."""
WIDEST = 200
"""Characters shown of a value."""

_WORDS = re.compile(r"""--[^\n]*|/\*.*?(?:\*/|$)|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^]]*]|\w+|\S""", re.DOTALL)


class QueryRefused(Exception):
    """Why a query has no result."""


def compare_queries(predicted: str, golden: str, database: str, seconds: float, most: int) -> tuple[float | None, str]:
    """1 or 0, and why it is 0; None where the golden query gives nothing to compare with."""
    try:
        wanted, width = run(golden, database, seconds, most)
    except QueryRefused as error:
        return None, f"the golden query has no result: {error}"
    try:
        said, other = run(predicted, database, seconds, most)
    except QueryRefused as error:
        return 0.0, f"the query has no result: {error}"
    if width != other:
        return 0.0, f"it has {other} columns, not {width}"
    if len(said) != len(wanted):
        return 0.0, f"it gives {len(said)} rows, not {len(wanted)}"
    said, wanted = without_noise(said, wanted)
    if are_same(said, wanted, ordered=has_order(golden)):
        return 1.0, ""
    return 0.0, "it gives other rows" if not are_same(
        said, wanted, ordered=False
    ) else "it gives the rows in another order"


def run(query: str, database: str, seconds: float, most: int) -> tuple[list[Row], int]:
    """The rows of a query, with values made comparable, and the number of its columns."""
    return _read(query, database, seconds, lambda cursor: _fetch(cursor, most))


def read_rows(query: str, database: str, seconds: float, most: int) -> tuple[list[str], list[list[str]], bool]:
    """The names of a query's columns, its first rows as text, and whether there are more of them."""

    def first(cursor: sqlite3.Cursor) -> tuple[list[str], list[list[str]], bool]:
        if cursor.description is None:
            raise QueryRefused("it is not a SELECT")
        rows = cursor.fetchmany(most + 1)
        names = [str(column[0]) for column in cursor.description]
        return names, [[_format_value(value) for value in row] for row in rows[:most]], len(rows) > most

    return _read(query, database, seconds, first)


def _format_value(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = "NULL" if value is None else str(value)
    return text if len(text) <= WIDEST else text[:WIDEST] + "..."


def _read(query: str, database: str, seconds: float, read: Callable[[sqlite3.Cursor], T]) -> T:
    try:
        with closing(open_database(database, time.monotonic() + seconds)) as db:
            return read(db.execute(query))
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:  # ValueErrors are NULs and surrogates
        said = f"it took more than {seconds:g} s" if str(error) == "interrupted" else str(error)
        raise QueryRefused(said) from None


def open_database(database: str, deadline: float) -> sqlite3.Connection:
    """The file, for reading and nothing else, until the deadline."""
    db = sqlite3.connect(f"{Path(database).as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    db.text_factory = _text
    db.execute("PRAGMA temp_store = FILE").close()
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST)
    db.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    db.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
    db.set_authorizer(_authorize)
    return db


def _text(data: bytes) -> str:
    """Not every database that calls itself UTF-8 is."""
    return data.decode(errors="replace")


def _authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """Called by SQLite for everything that a query would do, before it does any of it."""
    fine = action in READING and not (action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in REFUSED)
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor, most: int) -> tuple[list[Row], int]:
    if cursor.description is None:
        raise QueryRefused("it is not a SELECT")
    rows: list[Row] = []
    size = 0
    for row in cursor:
        rows.append(tuple(map(normalise_value, row)))
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if len(rows) > most or size > MOST:
            raise QueryRefused(
                f"it gives more than {most} rows" if len(rows) > most else f"it gives more than {MOST} bytes"
            )
    return rows, len(cursor.description)


def normalise_value(value: Any) -> Any:
    """
    >>> normalise_value(2.0), normalise_value(2.5), normalise_value("2"), normalise_value(None)
    (2, 2.5, '2', None)
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def without_noise(*results: Sequence[Row]) -> list[list[Row]]:
    """The results with one number for all that differ by rounding alone. No two whole numbers become one.

    >>> without_noise([(0.1 + 0.2, 7)], [(0.3, 6.999999999999999)])
    [[(0.3, 6.999999999999999)], [(0.3, 6.999999999999999)]]
    """
    numbers = sorted({value for rows in results for row in rows for value in row if isinstance(value, int | float)})
    stands_for: dict[float, float] = {}
    last, whole = math.nan, False
    for number in numbers:
        alike = math.isclose(number, last, rel_tol=NOISE) and not (whole and isinstance(number, int))
        stands_for[number] = stands_for[last] if alike else number
        whole = isinstance(number, int) or (alike and whole)
        last = number
    return [[tuple(stands_for.get(value, value) for value in row) for row in rows] for rows in results]


def are_same(said: Sequence[Row], wanted: Sequence[Row], *, ordered: bool) -> bool:
    """Whether there is an order of `said`'s columns that makes it `wanted`.

    >>> are_same([("a", 1), ("b", 2)], [(2, "b"), (1, "a")], ordered=False)
    True
    >>> are_same([(1, 2), (2, 1)], [(1, 1), (2, 2)], ordered=False)
    False
    """

    def take(rows: Sequence[Row], columns: Sequence[int]) -> Any:
        found = [tuple(row[column] for column in columns) for row in rows]
        return found if ordered else Counter(found)

    def fits(columns: list[int]) -> bool:
        """One column after the other, and no further where the first ones do not fit already."""
        if columns and take(said, columns) != take(wanted, range(len(columns))):
            return False
        # Of columns with the same values one is enough to try.
        free = {held[column]: column for column in range(len(held)) if column not in columns}
        return not free or any(fits([*columns, column]) for column in free.values())

    held = list(zip(*said, strict=True))
    return len(said) == len(wanted) and fits([])


def has_order(query: str) -> bool:
    """Whether there is an ORDER BY outside all brackets.

    >>> has_order("SELECT a FROM (SELECT a FROM t ORDER BY b)"), has_order("select 'order by' -- order by")
    (False, False)
    >>> has_order("WITH x AS (SELECT 1) SELECT * FROM x order /* */ by 1")
    True
    """
    depth, words = 0, list[str]()
    for word in _WORDS.findall(query):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth == 0 and not word.startswith(("--", "/*")):
            words.append(word.lower())
    return ("order", "by") in pairwise(words)
