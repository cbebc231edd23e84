"""An airline's database, as tau2-bench has it, and what one conversation changes in it.

    {"users":        {"mia_li_3668": {"payment_methods": {...}, "reservations": ["NO6JO3"], ...}},
     "reservations": {"NO6JO3": {"user_id": "mia_li_3668", "flights": [...], "payment_history": [...], ...}},
     "flights":      {"HAT039": {"origin": "ATL", "dates": {"2024-05-20": {"status": "available", "prices": ...}}}}}

Everybody reads the same rows; what a conversation changes are copies of its own. So a database of any size costs
nothing for a rollout, and two conversations came to the same exactly when their `changes` are equal. Flights are never
changed: a seat that is taken is not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
Rows = dict[str, dict[str, Row]]


class NotThere(ValueError):
    """There is no such row: the model is told."""


class Database:
    """
    >>> database = Database({"users": {"mia": {"email": "a"}}, "reservations": {}, "flights": {}})
    >>> database.user("mia")["email"] = "b"
    >>> database.changes()
    {('users', 'mia'): {'email': 'b'}}
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._own: dict[tuple[str, str], Row] = {}

    def user(self, id: str) -> Row:
        return self._find("users", id)

    def reservation(self, id: str) -> Row:
        return self._find("reservations", id)

    def flight(self, number: str) -> Row:
        if number not in self._rows["flights"]:
            raise NotThere(f"there is no flight {number}")
        return self._rows["flights"][number]

    def flights(self) -> Iterator[Row]:
        return iter(self._rows["flights"].values())

    def add(self, id: str, reservation: Row) -> None:
        self._own["reservations", id] = reservation

    def is_taken(self, id: str) -> bool:
        return ("reservations", id) in self._own or id in self._rows["reservations"]

    def _find(self, table: str, id: str) -> Row:
        if (table, id) not in self._own:
            if id not in self._rows[table]:
                raise NotThere(f"there is no {table.removesuffix('s')} {id}")
            self._own[table, id] = copy.deepcopy(self._rows[table][id])
        return self._own[table, id]

    def changes(self) -> dict[tuple[str, str], Row]:
        """The rows that are not what they were."""
        return {at: row for at, row in self._own.items() if row != self._rows[at[0]].get(at[1])}
