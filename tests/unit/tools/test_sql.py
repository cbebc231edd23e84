"""Queries run for a model: rows as text, and whatever goes wrong as a sentence."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from strop.errors import PlaceError
from strop.tools.sql import run_query


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "people.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE people (name TEXT, age INTEGER, face BLOB)")
        db.executemany("INSERT INTO people VALUES (?, ?, ?)", [("Ann", 30, None), ("Bo", 20, b"abc")])
        db.commit()
    return path


def test_rows_as_text(database: Path) -> None:
    seen = run_query("SELECT name, age AS years, face FROM people", database)
    assert seen.ok
    assert seen.text == "name | years | face\nAnn | 30 | NULL\nBo | 20 | 3 bytes"
    assert run_query("SELECT name FROM people WHERE 0", database).text == "name\n[no rows]"
    assert run_query("SELECT name FROM people", database, rows=1).text == "name\nAnn\n[more than 1 rows]"
    long = run_query("SELECT printf('%.*c', 9000, 'x')", database).text
    assert len(long) < 300
    assert "cut here" in run_query("SELECT name FROM people", database, limit=6).text


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT nobody FROM people", "no such column: nobody"),
        ("DROP TABLE people", "not authorized"),
        ("", "there is no query"),
        ("-- nothing", "not a SELECT"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c", "more than 1 s"),
    ],
)
def test_what_goes_wrong_is_said(query: str, why: str, database: Path) -> None:
    seen = run_query(query, database, seconds=1)
    assert not seen.ok
    assert seen.text.startswith("error: ")
    assert why in seen.text
    assert run_query("SELECT count(*) FROM people", database).text.endswith("2")


def test_endless_rows_are_left_unread(database: Path) -> None:
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c"
    assert run_query(endless, database, rows=2).text == "n\n1\n2\n[more than 2 rows]"


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="no database"):
        run_query("SELECT 1", tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()
