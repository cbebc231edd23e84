"""Queries compared by what they give, and queries that try to do something else."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from strop.errors import PlaceError, StropError
from strop.rewards import sql_match
from strop.rewards.query import are_same, has_order
from tests.limits import stretch

SPIDER = Path(__file__).parents[4] / "shared" / "data" / "spider"
ALL = "SELECT name, age FROM people"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "people, 100%?#.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE people (name TEXT, age INTEGER, height REAL, boss TEXT)")
        people = [("Ann", 30, 1.5, None), ("Bo", 20, 2.0, "Ann"), ("Cy", 20, 1.75, ""), ("Bo", 20, 2.0, "Ann")]
        db.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", people)
        db.execute("INSERT INTO people (name, age) SELECT 'x' || value, 5 FROM json_each(?)", (str(list(range(3000))),))
        db.execute("INSERT INTO people (name) VALUES (CAST(x'ff41' AS TEXT))")
        db.commit()
    return path


@pytest.mark.parametrize(
    ("predicted", "golden"),
    [
        (ALL + " ORDER BY age", ALL),  # the golden query does not care
        ("SELECT age AS years, name AS who FROM people;", ALL),
        ("SELECT 1.0, 0.1 + 0.2", "SELECT 1, 0.3"),
        ("SELECT 12345678901.0", "SELECT 12345678901"),
        ("SELECT 2418061164.9999995", "SELECT 2418061165.0000005"),  # sums in another order
        ("SELECT 2500000001.0000005 UNION ALL SELECT 3", "SELECT 3 UNION ALL SELECT 2500000001"),
        ("SELECT 0.1 + 0.2, 1 UNION ALL SELECT 0.3, 2", "SELECT 2, 0.3 UNION ALL SELECT 1, 0.3"),
        ("SELECT 9e999, -9e999", "SELECT -9e999, 9e999"),
        ("SELECT NULL", "SELECT boss FROM people WHERE name = 'Ann'"),
        ("WITH p AS (SELECT * FROM people) SELECT name, age FROM p", ALL),
        ("SELECT name FROM people WHERE age IN (20, 30) ORDER BY age, name", "SELECT name FROM people WHERE age >= 20"
         " ORDER BY age, name"),
        ("SELECT a.name, a.name, a.age FROM people a", "SELECT age, name, name FROM people"),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 3) SELECT n FROM c",
         "SELECT 3 UNION SELECT 2 UNION SELECT 1"),
        ("SELECT name FROM people WHERE 0", "SELECT name FROM people WHERE age > 99"),
        ("SELECT name FROM people", "SELECT name FROM people"),  # bad UTF-8 and all
    ],
)  # fmt: skip
def test_the_same(predicted: str, golden: str, database: Path) -> None:
    verdict = sql_match(predicted, golden, database)
    assert float(verdict) == 1.0, verdict.why


@pytest.mark.parametrize(
    ("predicted", "golden", "why"),
    [
        ("SELECT name FROM people WHERE age = 30", "SELECT name FROM people WHERE age = 20", "1 rows, not 3"),
        ("SELECT DISTINCT name FROM people WHERE age = 20", "SELECT name FROM people WHERE age = 20", "2 rows, not 3"),
        ("SELECT name FROM people", ALL, "1 columns, not 2"),
        ("SELECT name, age FROM people WHERE 0", "SELECT name FROM people WHERE 0", "columns"),
        ("SELECT '20'", "SELECT 20", "other rows"),
        ("SELECT ''", "SELECT NULL", "other rows"),
        ("SELECT 'ann'", "SELECT 'Ann'", "other rows"),
        ("SELECT 0.30001", "SELECT 0.3", "other rows"),
        ("SELECT 1234567891.25", "SELECT 1234567894.25", "other rows"),
        ("SELECT 1234567891.25", "SELECT 1234567891.5", "other rows"),
        ("SELECT 12345678901234567", "SELECT 12345678901234568", "other rows"),
        (
            "SELECT 12345678901234 UNION ALL SELECT 12345678901234.5 UNION ALL SELECT 12345678901234",
            "SELECT 12345678901234 UNION ALL SELECT 12345678901234.5 UNION ALL SELECT 12345678901235",
            "other rows",
        ),
        ("SELECT 9e999", "SELECT 1.7e308", "other rows"),
        ("SELECT 0.1 + 0.2 UNION ALL SELECT 0.3", "SELECT 0.3 UNION ALL SELECT 0.4", "other rows"),
        ("SELECT 1 UNION SELECT 2", "SELECT 1 UNION SELECT 2 ORDER BY 1 DESC", "another order"),
        ("SELECT nobody FROM people", ALL, "no such column"),
        ("SELECT", ALL, "incomplete input"),
        ("", ALL, "no query"),
        (None, ALL, "no query"),
        ("-- nothing", ALL, "not a SELECT"),
    ],
)
def test_not_the_same(predicted: str, golden: str, why: str, database: Path) -> None:
    verdict = sql_match(predicted, golden, database)
    assert float(verdict) == 0.0
    assert why in verdict.why


def test_nothing_is_said_about_a_golden_query_that_gives_nothing(database: Path) -> None:
    verdict = sql_match(ALL, "SELECT nobody FROM people", database)
    assert verdict.value is None
    with pytest.raises(StropError, match="no verdict: the golden query has no result: no such column: nobody"):
        bool(verdict)


@pytest.mark.parametrize(
    "attack",
    [
        "DROP TABLE people",
        "INSERT INTO people (name) VALUES ('x')",
        "UPDATE people SET age = 1",
        "DELETE FROM people RETURNING *",
        "CREATE TEMP TABLE x (a)",
        "ATTACH '{place}/new.sqlite' AS x",
        "ATTACH ':memory:' AS x",
        "VACUUM INTO '{place}/new.sqlite'",
        "PRAGMA journal_mode = DELETE",
        "SELECT * FROM pragma_table_info('people')",
        "SELECT load_extension('{place}/new.so')",
        "BEGIN",
        "SELECT 1; DROP TABLE people",
    ],
)
def test_queries_only_read(attack: str, database: Path, tmp_path: Path) -> None:
    before = database.read_bytes()
    assert float(sql_match(attack.format(place=tmp_path), ALL, database)) == 0.0
    assert sql_match(ALL, attack.format(place=tmp_path), database).value is None
    assert database.read_bytes() == before
    assert not list(tmp_path.iterdir())
    assert [path.name for path in database.parent.iterdir()] == [database.name]


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c", "more than 1 s"),
        ("SELECT count(*) FROM people a, people b, people c, people d", "more than 1 s"),
        ("SELECT a.name FROM people a, people b", "more than 100000 rows"),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c", "more than 100000 rows"),
        ("SELECT a.name, hex(zeroblob(20000)) FROM people a", "bytes"),
        ("SELECT zeroblob(2000000000)", "too big"),
        ("SELECT printf('%.*c', 2000000000, 'x')", "more"),
        ("WITH RECURSIVE c(b) AS (SELECT randomblob(900000) UNION SELECT randomblob(900000) FROM c)"
         " SELECT count(*) FROM c", ""),
    ],
)  # fmt: skip
def test_what_is_too_much_is_stopped(attack: str, why: str, database: Path) -> None:
    began = time.monotonic()
    seconds = 60 if "rows" in why or "bytes" in why else 1  # on a busy machine little is read in one
    verdict = sql_match(attack, ALL, database, seconds=seconds)
    assert time.monotonic() - began < stretch(10)
    assert float(verdict) == 0.0
    assert why in verdict.why
    assert float(sql_match(ALL, ALL, database)) == 1.0


def test_many_columns_alike_are_told_apart_in_time() -> None:
    rows = [(*[n % 2] * 20, n) for n in range(8)]
    other = [(*[n % 2] * 20, -n) for n in range(8)]
    assert are_same(rows, [row[::-1] for row in rows], ordered=True)
    assert not are_same(rows, other, ordered=False)
    assert not are_same([(0, 1), (1, 0)], [(0, 0), (1, 1)], ordered=False)  # columns are alike, rows are not


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order\n  by a LIMIT 1", True),
        ("SELECT a FROM t WHERE b = (SELECT max(b) FROM t ORDER BY c)", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'x ORDER BY y' FROM t -- ORDER BY z", False),
        ('SELECT "order by" FROM [order by] /* ORDER BY a */', False),
        ("SELECT ')' FROM (SELECT 1 ORDER BY 1)", False),
    ],
)
def test_order_counts_only_at_the_top(query: str, ordered: bool) -> None:
    assert has_order(query) == ordered


def test_a_database_that_is_not_there_is_said() -> None:
    with pytest.raises(PlaceError, match="no database"):
        sql_match("SELECT 1", "SELECT 1", "/nowhere/x.sqlite")


def test_spider_s_golden_queries() -> None:
    if not SPIDER.exists():
        pytest.skip("the data set is not there")
    tasks = [json.loads(line) for line in (SPIDER / "dev.jsonl").read_text().strip().split("\n")]
    began = time.monotonic()
    wrong = 0
    for task, before in zip(tasks, [tasks[-1], *tasks], strict=False):
        database = SPIDER / "database" / f"{task['db_id']}.sqlite"
        verdict = sql_match(task["query"], task["query"], database)
        assert verdict, (task["query"], verdict.why)
        wrong += task["query"] == before["query"] or not sql_match(before["query"], task["query"], database)
    assert wrong >= len(tasks) - 5  # the one before asks for something else, nearly always in another database
    assert time.monotonic() - began < stretch(60)
