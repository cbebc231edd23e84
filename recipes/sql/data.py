"""Spider's questions and databases as tasks.

    --data FOLDER     what Spider's download unpacks to: train_spider.json, dev.json, database/NAME/NAME.sqlite. The
                      questions may also be train*.jsonl and dev.jsonl, and databases database/NAME.sqlite. A folder
                      with databases only gets its questions from the Hugging Face data set xlangai/spider.
    data = "made"     four small databases, made here, with questions of the same kind

Tasks of split `test` are Spider's dev questions: none of their databases is among those of `train`.
"""

import json
import random
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from strop import Task
from strop.errors import TaskError
from strop.tasks.load import load

HUB = "xlangai/spider"
MADE = Path(__file__).parents[2] / ".recipes" / "made" / "sql"
Tables = dict[str, list[str]]


def tasks(
    data: str = HUB,
    level: str = "all",
    columns: int | None = None,
    examples: int = 0,
    rewrites: int = 2,
    test: int | None = None,
    seed: int = 0,
) -> list[Task]:
    """Tasks from `data`.

    `level`: "all", "easy" (see `is_easy`), or "plain": easy ones without a condition or an order. `columns`: only
    databases with at most so many columns, all tables taken together. `examples`: how many questions about each
    database stand solved before the question (see `solved`). `rewrites`: how often the agent may try again. `test`: so
    many of the test questions, drawn by `seed`.
    """
    if test is not None and test < 0:
        raise TaskError(f"test is {test}: say how many questions to keep aside")
    if level not in ("all", "easy", "plain"):
        raise TaskError(f'there is no level {level!r}: choose "all", "easy" or "plain"')
    place = made() if data == "made" else Path(data)
    about: dict[str, tuple[Path, Tables, list[tuple[str, str]]]] = {}
    found: dict[str, list[Task]] = {"train": [], "test": []}
    for split, number, row in questions(place):
        name = row["db_id"]
        if name not in about:
            path = database(place, name)
            about[name] = (path, tables := tables_of(path), solved(path, tables))
        path, tables, shown = about[name]
        if columns is not None and sum(map(len, tables.values())) > columns:
            continue
        if level != "all" and not is_easy(row["query"], clauses=level == "easy"):
            continue
        given = {"question": row["question"], "query": row["query"], "db_id": name, "database": str(path)}
        others = [one for one in shown if plain(one[1]) != plain(row["query"])]  # the answer is not given away
        given |= {"schema": schema(tables), "examples": others[:examples], "rewrites": rewrites}
        found[split].append(Task(id=f"spider-{split}-{number}", split=split, data=given))
    if test is not None and test < len(found["test"]):
        found["test"] = random.Random(seed).sample(found["test"], test)
    if not found["train"]:
        raise TaskError(f"none of the questions in {place} is left: take level=all, or more columns")
    return found["train"] + found["test"]


def plain(query: str) -> str:
    """
    >>> plain("SELECT COUNT(*) FROM Singer;") == plain("select count( * ) from singer")
    True
    """
    return re.sub(r"[\s;\"]", "", query).lower()


def is_easy(query: str, clauses: bool = True) -> bool:
    """Whether a query reads one table, once, with at most one condition or one order, or none at all without `clauses`.
    Spider's own easy questions are of this kind, but for a few.

    >>> is_easy("SELECT name FROM singer WHERE age > 20"), is_easy("SELECT max(age), min(age) FROM singer")
    (True, True)
    >>> is_easy("SELECT name FROM singer WHERE age > 20 ORDER BY age"), is_easy("SELECT 1 FROM a JOIN b")
    (False, False)
    >>> is_easy("SELECT name FROM singer WHERE age > 20", clauses=False), is_easy("SELECT name FROM a", clauses=False)
    (False, True)
    """
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "''", query.upper())
    words = re.findall(r"\w+", text)
    said = words.count("WHERE") + len(re.findall(r"\bORDER\s+BY\b", text))
    more = {"JOIN", "UNION", "INTERSECT", "EXCEPT", "GROUP", "HAVING", "AND", "OR"}
    alone = words.count("SELECT") == 1 and "," not in text.split("FROM")[-1]
    return alone and said <= clauses and not more & set(words)


# -- what Spider's folder holds ----------------------------------------------------------------------------------------


def questions(place: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(split, number, {"db_id", "question", "query", ...}) of every question."""
    if not (place / "database").is_dir():
        raise TaskError(
            f"there are no databases in {place / 'database'}: download Spider (https://yale-lily.github.io/spider), "
            "unpack it and give --data FOLDER"
        )
    files = {"train": sorted(place.glob("train*.json*")), "test": sorted(place.glob("dev*.json*"))}
    for split, found in files.items():
        rows: Iterable[dict[str, Any]] = (row for file in found for row in rows_of(file)) if found else hub(split)
        for number, row in enumerate(rows):
            yield split, number, row


def rows_of(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [task.data for task in load(file)]
    try:
        return json.loads(file.read_text("utf-8-sig"))
    except ValueError as error:
        raise TaskError(f"{file} is not valid JSON ({error}): is it Spider's?") from None


def hub(split: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets

        return datasets.load_dataset(HUB, split={"train": "train", "test": "validation"}[split])
    except Exception as error:
        raise TaskError(
            f"Spider's questions cannot be fetched as {HUB} ({type(error).__name__}: {str(error)[:200]}): put "
            "train_spider.json and dev.json beside the databases and give --data FOLDER"
        ) from None


def database(place: Path, name: str) -> Path:
    for path in (place / "database" / name / f"{name}.sqlite", place / "database" / f"{name}.sqlite"):
        if path.is_file():
            return path.absolute()
    raise TaskError(f"{place} has questions about the database {name}, but no database/{name}/{name}.sqlite")


# -- what a model is told of a database --------------------------------------------------------------------------------


def tables_of(path: Path) -> Tables:
    with closing(read(path)) as db, said_of(path):
        names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        return {
            name: [row[1] for row in db.execute(f"PRAGMA table_info({quoted(name)})")] for (name,) in db.execute(names)
        }


def schema(tables: Tables) -> str:
    """
    >>> print(schema({"singer": ["id", "name"], "song": ["title"]}))
    singer(id, name)
    song(title)
    """
    return "\n".join(f"{name}({', '.join(columns)})" for name, columns in tables.items())


def solved(path: Path, tables: Tables) -> list[tuple[str, str]]:
    """Up to three simple questions about each table with their queries, made from its columns and one of its rows: they
    show a small model what an answer looks like, and how this database spells its names."""
    found: list[tuple[str, str]] = []
    with closing(read(path)) as db:
        for table, columns in tables.items():
            what, by, where = words(table), columns[-1], quoted(table)
            one = columns[min(1, len(columns) - 1)]
            found.append((f"How many {what} are there?", f"SELECT COUNT(*) FROM {where}"))
            found.append((f"Show the {words(one)} of all {what}.", f"SELECT {quoted(one)} FROM {where}"))
            row = db.execute(f"SELECT {quoted(by)} FROM {where} WHERE {quoted(by)} IS NOT NULL").fetchone()
            if by != one and row is not None and not isinstance(row[0], bytes) and len(str(row[0])) < 40:
                value = str(row[0]) if not isinstance(row[0], str) else "'" + row[0].replace("'", "''") + "'"
                asked = f"What is the {words(one)} of the {what} with {words(by)} {value}?"
                found.append((asked, f"SELECT {quoted(one)} FROM {where} WHERE {quoted(by)} = {value}"))
    return found


def words(name: str) -> str:
    """
    >>> words("Birth_Year"), words("AirportName")
    ('birth year', 'airport name')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def quoted(name: str) -> str:
    """
    >>> quoted("name"), quoted("order"), quoted('a"b')
    ('name', '"order"', '"a""b"')
    """
    plain = re.fullmatch(r"[A-Za-z_]\w*", name) and not reserved(name)
    return name if plain else '"' + name.replace('"', '""') + '"'


@cache
def reserved(name: str) -> bool:
    """Whether a name means something else in SQL."""
    with closing(sqlite3.connect(":memory:")) as db:
        try:
            db.execute(f"CREATE TABLE {name} ({name})")
        except sqlite3.OperationalError:
            return True
    return False


@contextmanager
def said_of(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise TaskError(f"{path} cannot be read ({error}): is it a SQLite database?") from None


def read(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    db.text_factory = lambda text: text.decode(errors="replace")
    return db


# -- databases made here -----------------------------------------------------------------------------------------------

SMALL: dict[str, tuple[str, str, list[str]]] = {
    "music": ("singer", "song", ["Ada", "Ben", "Cleo", "Dov", "Eva", "Finn"]),
    "library": ("writer", "book", ["Iris", "Jon", "Kim", "Lars", "Mona"]),
    "racing": ("driver", "race", ["Nia", "Otto", "Pia", "Quin", "Rosa", "Sam", "Tess"]),
    "school": ("teacher", "course", ["Uma", "Vic", "Wes", "Xena", "Yara"]),
}
"""A database's people, what they made, and their names. The last one is for the test split."""
COUNTRIES = ["France", "Japan", "Kenya", "Peru"]


def made() -> Path:
    """Small databases and questions in Spider's own layout; the same ones each time."""
    rows: dict[str, list[dict[str, str]]] = {"train_spider.json": [], "dev.json": []}
    for name, (person, thing, people) in SMALL.items():
        (folder := MADE / "database" / name).mkdir(parents=True, exist_ok=True)
        rng = random.Random(name)
        with closing(sqlite3.connect(":memory:")) as db:
            db.execute(f"CREATE TABLE {person} ({person}_id INTEGER PRIMARY KEY, name TEXT, age INTEGER, country TEXT)")
            db.execute(f"CREATE TABLE {thing} ({thing}_id INTEGER PRIMARY KEY, title TEXT, year INTEGER, {person}_id)")
            who = [(n, one, rng.randrange(20, 70), rng.choice(COUNTRIES)) for n, one in enumerate(people, 1)]
            what = [(n, f"{thing.title()} {n}", rng.randrange(1990, 2020), rng.choice(who)[0]) for n in range(1, 12)]
            db.executemany(f"INSERT INTO {person} VALUES (?, ?, ?, ?)", who)
            db.executemany(f"INSERT INTO {thing} VALUES (?, ?, ?, ?)", what)
            db.commit()
            write(folder / f"{name}.sqlite", db.serialize())
        asked = [
            (f"How many {person}s are there?", f"SELECT count(*) FROM {person}"),
            (f"Count the number of {thing}s.", f"SELECT count(*) FROM {thing}"),
            (f"List the name of all {person}s.", f"SELECT name FROM {person}"),
            (f"What are the title and year of each {thing}?", f"SELECT title, year FROM {thing}"),
            (
                f"What is the age of the {person} named {who[0][1]}?",
                f"SELECT age FROM {person} WHERE name = '{who[0][1]}'",
            ),
            (
                f"Show the names of {person}s from {who[1][3]}.",
                f"SELECT name FROM {person} WHERE country = '{who[1][3]}'",
            ),
            (f"What is the average age of all {person}s?", f"SELECT avg(age) FROM {person}"),
            (f"Which countries do {person}s come from?", f"SELECT DISTINCT country FROM {person}"),
            (f"List the titles of {thing}s, newest first.", f"SELECT title FROM {thing} ORDER BY year DESC"),
            (
                f"How many {thing}s does each {person} have?",
                f"SELECT T1.name, count(*) FROM {person} AS T1 JOIN {thing} AS T2 ON T1.{person}_id = T2.{person}_id "
                "GROUP BY T1.name",
            ),
        ]
        file = "dev.json" if name == "school" else "train_spider.json"
        rows[file] += [{"db_id": name, "question": question, "query": query} for question, query in asked]
    for file, found in rows.items():
        write(MADE / file, json.dumps(found, indent=1).encode())
    return MADE


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, for several runs may begin at once."""
    if not path.exists() or path.read_bytes() != content:
        (part := path.with_name(f"{path.name}.{random.randrange(10**9)}")).write_bytes(content)
        part.replace(path)
