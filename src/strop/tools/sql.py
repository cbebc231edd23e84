"""Queries that a model wrote, run on a SQLite file, and what they give as text for it to read.

    run_query("SELECT name, age FROM people", "people.sqlite").text

    name | age
    Ann | 30
    Bo | 20

A query may only read, in a process of its own, with limits on time and memory (strop.rewards.sql says more). What goes
wrong is its result.
"""

from __future__ import annotations

from pathlib import Path

from strop.agent.tool import Observation, truncate
from strop.errors import PlaceError
from strop.rewards import worker


def run_query(
    query: str, database: str | Path, *, seconds: float = 5.0, rows: int = 20, limit: int = 2000
) -> Observation:
    """The first `rows` rows, cut after `limit` characters; or what is wrong with the query."""
    path = Path(database).absolute()
    if not path.is_file():
        raise PlaceError(f"there is no database {path}. Fix: check the path")
    if not query.strip():
        return Observation("error: there is no query", wrong="error")
    try:
        names, found, more, why = worker.call("rows", [query, str(path), seconds, rows], seconds + 2)
    except TimeoutError as error:
        return Observation(f"error: {error}", wrong="timeout")
    if why:
        return Observation(f"error: {why}", wrong="error")
    lines = [" | ".join(row) for row in [names, *found]] + ([f"[more than {rows} rows]"] if more else [])
    return Observation(truncate("\n".join(lines if found else [*lines, "[no rows]"]), limit))
