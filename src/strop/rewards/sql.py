"""Whether a query gives what the golden one gives, on a SQLite file.

Both are executed, as in Spider's execution accuracy:
- rows are compared as a multiset; their order counts only where the golden query has an ORDER BY at its top level;
- names of columns do not matter, and neither does their order, as long as one order fits all rows; their number does;
- 1 is 1.0; whole numbers are compared exactly, others to twelve digits, so that rounding does not matter; NULL is only
  NULL; text is compared as it is and is never a number.

The file is opened read-only and as one that nobody changes. A query may only read: what writes, attaches, asks for a
PRAGMA or loads an extension is refused by SQLite itself before it runs. It runs in a process of its own, with limits on
time, rows, memory and temporary files.

Left out: rows that tie in an ORDER BY may come in any order, but are compared in the one they came in.
"""

from __future__ import annotations

from pathlib import Path

from strop.errors import PlaceError
from strop.rewards import worker
from strop.rewards.verdict import Verdict


def sql_match(
    predicted: str | None, golden: str, database: str | Path, *, seconds: float = 5.0, rows: int = 100_000
) -> Verdict:
    """1 if both queries give the same, otherwise 0 with the reason; no verdict where the golden one gives nothing. Each
    may take `seconds` and give `rows` rows."""
    path = Path(database).absolute()
    if not path.is_file():
        raise PlaceError(f"there is no database {path}. Fix: check the path")
    if not predicted or not predicted.strip():
        return Verdict(0.0, "there is no query")
    try:
        value, why = worker.call("match", [predicted, golden, str(path), seconds, rows], 2 * seconds + 2)
    except TimeoutError as error:
        return Verdict(0.0, str(error))
    return Verdict(value, why)
