"""Pages of rollouts: which rows a page has, and its JSON, kept until a rollout changes.

    which rollouts ──▶ as many changes as when the page was made? ──▶ the same bytes     else rows ──▶ JSON, kept

Who looks again, and many who look at once, cost no more than passing it on. Every verb that writes to the table of
rollouts counts a change (`transitions.tick`), so the count says whether a page still holds; turns, events and
heartbeats leave it as it is. It is read in the same view of the data as the rows.

Left out: keeping what has not changed of a page. It is made anew.
"""

from __future__ import annotations

from msgspec import Struct

from strop.store import rows, transitions
from strop.store.transitions import Db
from strop.types import Mode, Status

BRIEF = 100
"""Most rollouts that are looked up and not read in a thread of their own."""
MAX_KEPT = 8 << 20
"""Bytes of all the pages that are kept, and of the names that they are asked for by."""
MAX_PAGES = 256
"""How many of them."""


class RolloutQuery(Struct, frozen=True):
    """What `Store.list` takes."""

    group: str | None = None
    status: Status | None = None
    mode: Mode | None = None
    after: str | None = None
    limit: int = 1000
    newest: bool = False

    @property
    def brief(self) -> bool:
        """One column leads through its index, unless it is the mode; a second one may be far between."""
        return self.limit <= BRIEF and self.mode is None and (self.group is None or self.status is None)

    def read(self, db: Db) -> list[rows.Row]:
        given = {"grp": self.group, "status": self.status, "mode": self.mode}
        where = {f"{column} = ?": value for column, value in given.items() if value is not None}
        if self.after is not None:
            transitions.find(db, self.after)
            where[f"seq {'<' if self.newest else '>'} (SELECT seq FROM rollouts WHERE id = ?)"] = self.after
        which = f"WHERE {' AND '.join(where)}" if where else ""
        query = f"SELECT {rows.ROLLOUT} FROM rollouts {which} ORDER BY seq {'DESC' if self.newest else ''} LIMIT ?"
        return db.execute(query, (*where.values(), self.limit)).fetchall()


class RolloutPages:
    """The pages of one store as JSON. Any thread may read."""

    def __init__(self) -> None:
        self._kept: tuple[int, dict[RolloutQuery, bytes]] = (-1, {})  # how many changes there were, and pages since

    def read(self, db: Db, query: RolloutQuery) -> bytes:
        (changes,) = db.execute("SELECT changes FROM strop").fetchone()
        since, pages = self._kept
        if changes == since and query in pages:
            return pages[query]
        page = rows.rollouts_json(query.read(db))
        self._keep(changes, query, page)
        return page

    def _keep(self, changes: int, query: RolloutQuery, page: bytes) -> None:
        since, pages = self._kept
        if changes < since or _size(query, page) > MAX_KEPT:
            return
        full = len(pages) >= MAX_PAGES or sum(_size(*kept) for kept in pages.items()) + _size(query, page) > MAX_KEPT
        if changes > since or full:
            pages = {}
        self._kept = changes, pages | {query: page}  # at one go, since other threads read it


def _size(query: RolloutQuery, page: bytes) -> int:
    return len(page) + len(query.group or "") + len(query.after or "")
