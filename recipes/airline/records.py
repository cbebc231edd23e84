"""A database put together from recorded conversations: what tools said before anything was changed, as tau-bench's
historical trajectories have it, one conversation a line (`traj`: its messages).

python recipes/airline/records.py trajectories.jsonl airline_tasks.json db.json

What the tasks' expected actions need and nobody looked up is made: users with what they pay with, flights at prices at
which payments add up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from airline_tools import CHANGES
from database import Row, Rows

SEATS, PRICES = (
    {"basic_economy": 9, "economy": 9, "business": 9},
    {"basic_economy": 80, "economy": 150, "business": 400},
)


def read(conversations: Iterable[list[Row]]) -> Rows:
    rows: Rows = {"users": {}, "reservations": {}, "flights": {}}
    for messages in conversations:
        changed: set[str] = set()  # what a conversation tells of these is what it made of them
        for name, given, said in _calls(messages):
            if said.startswith("Error"):
                continue
            if name.startswith(CHANGES):
                found = json.loads(said) if said.startswith("{") else {}
                changed |= {(found | given).get("user_id", ""), given.get("reservation_id", "")}
            elif name.startswith(("get_", "search_")) and not changed & set(map(str, given.values())):
                _note(rows, name, given, json.loads(said))
    return rows


def _note(rows: Rows, name: str, given: Row, found: Any) -> None:
    if name == "get_user_details":
        rows["users"].setdefault(given["user_id"], found)
    elif name == "get_reservation_details":
        rows["reservations"].setdefault(found["reservation_id"], found)
    elif name == "search_direct_flight":
        for flight in found:
            add_flight(rows, flight, given["date"])
    elif name == "search_onestop_flight":
        for flight in (flight for pair in found for flight in pair):
            add_flight(rows, flight, flight["date"])


def _calls(messages: list[Row]) -> Iterator[tuple[str, Row, str]]:
    """Every tool call with its arguments and what came of it; there is one call in a message."""
    for before, one in pairwise(messages):
        if one["role"] == "tool":
            (call,) = before["tool_calls"]
            yield one["name"], json.loads(call["function"]["arguments"]), one["content"]


def add_flight(rows: Rows, flight: Row, date: str) -> None:
    day = {name: flight[name] for name in ("status", "available_seats", "prices")}
    rest = {name: value for name, value in flight.items() if name not in (*day, "date")}
    rows["flights"].setdefault(rest["flight_number"], {**rest, "dates": {}})["dates"].setdefault(date, day)


# -- what is missing ---------------------------------------------------------------------------------------------------


def complete(rows: Rows, tasks: list[Row]) -> Rows:
    for task in tasks:
        for action in task["evaluation_criteria"]["actions"]:
            given = action["arguments"]
            trip = rows["reservations"].get(given.get("reservation_id", ""), given)
            if action["name"].startswith(CHANGES) and "user_id" in trip:
                _complete_user(rows, given, trip)
            if "flights" in given:
                _complete_flights(rows, given, trip)
    return rows


def _complete_user(rows: Rows, given: Row, trip: Row) -> None:
    """Who acts, with what is paid with."""
    id = trip["user_id"]
    if id not in rows["users"]:
        first, last = id.split("_")[:2]
        theirs = [name for name, one in rows["reservations"].items() if one["user_id"] == id]
        name = {"first_name": first.title(), "last_name": last.title()}
        rows["users"][id] = {"name": name, "payment_methods": {}, "membership": "regular", "reservations": theirs}
    methods = rows["users"][id]["payment_methods"]
    paid = {one["payment_id"]: one["amount"] for one in given.get("payment_methods", [])}
    for method in [*paid, *([given["payment_id"]] if "payment_id" in given else [])]:
        amount = {} if method.startswith("credit_card") else {"amount": paid.get(method, 5000)}
        methods.setdefault(method, {"source": method.rpartition("_")[0], "id": method, **amount})


def _complete_flights(rows: Rows, given: Row, trip: Row) -> None:
    """The flights that an action names."""
    known = [rows["flights"].get(one["flight_number"]) for one in given["flights"]]
    missing = [
        at
        for at, one in enumerate(given["flights"])
        if (flight := known[at]) is None or one["date"] not in flight["dates"]
    ]
    prices = _split_price(rows, given, missing)
    for at, price in zip(missing, prices, strict=True):
        one, flight = given["flights"][at], known[at]
        before, after = (known[at - 1] if at else None), (known[at + 1] if at + 1 < len(known) else None)
        made = {
            "flight_number": one["flight_number"],
            "origin": flight["origin"] if flight else before["destination"] if before else trip["origin"],
            "destination": flight["destination"] if flight else after["origin"] if after else trip["destination"],
            "scheduled_departure_time_est": "12:00:00",
            "scheduled_arrival_time_est": "14:00:00",
            "status": "available",
            "available_seats": SEATS,
            "prices": PRICES | ({} if price is None else {given["cabin"]: price}),
        }
        add_flight(rows, made, one["date"])
        known[at] = rows["flights"][one["flight_number"]]


def _split_price(rows: Rows, given: Row, missing: list[int]) -> list[int | None]:
    """Of a booking's missing flights: what is paid and not for those that are known, in equal parts."""
    if "payment_methods" not in given:
        return [None] * len(missing)
    extra = 50 * given["nonfree_baggages"] + 30 * len(given["passengers"]) * (given["insurance"] == "yes")
    left = (sum(payment["amount"] for payment in given["payment_methods"]) - extra) // len(given["passengers"])
    for at, one in enumerate(given["flights"]):
        if at not in missing:
            left -= rows["flights"][one["flight_number"]]["dates"][one["date"]]["prices"][given["cabin"]]
    return [left // len(missing) + (left % len(missing) if at == missing[0] else 0) for at in missing]


def main(records: str, tasks: str, out: str) -> None:
    lines = Path(records).read_text("utf-8").splitlines()
    rows = complete(read(json.loads(line)["traj"] for line in lines), json.loads(Path(tasks).read_bytes()))
    Path(out).write_text(json.dumps(rows), "utf-8")
    print(f"{out}: " + ", ".join(f"{len(found)} {name}" for name, found in rows.items()))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("python recipes/airline/records.py trajectories.jsonl airline_tasks.json db.json")
    main(*sys.argv[1:])
