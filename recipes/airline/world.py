"""Conversations as tasks: of tau2-bench's airline, or of a small one made here.

    tasks("made")                              nothing to download; three kinds of request, and a policy of four lines
    tasks("tau2-bench/data/tau2/domains/airline")    a folder with db.json, policy.md and tasks.json

    {"folder": "made", "scenario": "Your name is ...", "expected": [{"name": "cancel_reservation", "arguments": {...}}],
     "communicate": ["4"], "max_turns": 30}

A folder whose files begin with the domain's name (airline_policy.md, airline_tasks.json) is read too. Where it has no
db.json, `records.py` puts one together from recorded conversations.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from database import Row, Rows
from msgspec import Struct

from strop import Task
from strop.errors import TaskError

MADE = "made"
FILES = ("db.json", "policy.md", "tasks.json")


class World(Struct, frozen=True):
    """What all conversations share. `tools` are those that the agent has; none named: all of them."""

    policy: str
    rows: Rows
    tools: tuple[str, ...] = ()


def tasks(data: str = MADE, held: int = 10, max_turns: int = 30, seed: int = 0) -> list[Task]:
    """`held` tasks are the split `test`."""
    rows = make_tasks(seed) if data == MADE else _read_tasks(Path(data))
    random.Random(seed).shuffle(rows)
    folder = data if data == MADE else str(Path(data).absolute())
    if folder != MADE:
        load_world(folder)  # what is missing is said before anything starts
    most = len(rows)
    if not 0 <= held <= most:
        raise TaskError(f"tasks_args.held is {held}, of {most} tasks. Fix: set it to a number from 0 to {most}")
    splits = ["test"] * held + ["train"] * (most - held)
    return [
        Task(id=row.pop("id"), split=split, data={"folder": folder, "max_turns": max_turns, **row})
        for split, row in zip(splits, rows, strict=True)
    ]


@cache
def load_world(folder: str) -> World:
    if folder == MADE:
        return World(policy=POLICY, rows=make_rows(), tools=TOOLS)
    database, policy, _ = (_find(Path(folder), name) for name in FILES)
    return World(policy=policy.read_text("utf-8"), rows=json.loads(database.read_bytes()))


def _find(folder: Path, name: str) -> Path:
    found = next((path for path in (folder / name, folder / f"airline_{name}") if path.is_file()), None)
    if found is None:
        more = ", or put one together: python recipes/airline/records.py" if name == "db.json" else ""
        raise TaskError(
            f"{folder} has no {name}. Fix: give the folder data/tau2/domains/airline of tau2-bench with --data{more}"
        )
    return found


def _read_tasks(folder: Path) -> list[Row]:
    return [_one_shape(row) for row in json.loads(_find(folder, "tasks.json").read_bytes())]


def _one_shape(row: Row) -> Row:
    told, wanted = row["user_scenario"]["instructions"], row["evaluation_criteria"]
    parts = [told.get(name) for name in ("known_info", "unknown_info", "reason_for_call", "task_instructions")]
    return {
        "id": f"airline-{row['id']}",
        "scenario": "\n\n".join(part.strip() for part in parts if part),
        "expected": [{"name": one["name"], "arguments": one["arguments"]} for one in wanted["actions"]],
        "communicate": wanted.get("communicate_info") or [],
    }


# -- made --------------------------------------------------------------------------------------------------------------


POLICY = """You serve an airline's customers. Look a reservation up before you change it.
- Only business reservations can be cancelled.
- A bag costs 50 dollars, paid with a method of the user's profile.
- Passengers' names can be corrected. Deny everything else."""
TOOLS = (
    "get_reservation_details",
    "cancel_reservation",
    "update_reservation_baggages",
    "update_reservation_passengers",
)
FIRST = ("Ada", "Bela", "Cleo", "Dora", "Egon", "Finn", "Gita", "Hugo")
LAST = ("Abbott", "Brandt", "Castell", "Dorn", "Eriksen", "Falk")
PLACES = ("JFK", "SEA", "ATL", "BOS", "DEN", "SFO")


@cache
def make_rows() -> Rows:
    """A reservation for every user; every second one is business."""
    draw, users, reservations = random.Random(7), {}, {}
    for number, (first, last) in enumerate((first, last) for first in FIRST for last in LAST):
        user, id, card = f"{first}_{last}_{number}".lower(), f"R{number:03d}", f"credit_card_{1000 + number}"
        origin, destination = draw.sample(PLACES, 2)
        price = draw.randrange(80, 400)
        passenger = {"first_name": first, "last_name": last, "dob": f"19{draw.randrange(50, 99)}-03-14"}
        users[user] = {
            "name": {"first_name": first, "last_name": last},
            "payment_methods": {card: {"source": "credit_card", "id": card}},
            "reservations": [id],
        }
        reservations[id] = {
            "reservation_id": id,
            "user_id": user,
            "origin": origin,
            "destination": destination,
            "cabin": "business" if number % 2 else "economy",
            "flights": [{"flight_number": f"F{number:03d}", "date": "2024-05-20", "price": price}],
            "passengers": [passenger],
            "payment_history": [{"payment_id": card, "amount": price}],
            "total_baggages": 1,
            "nonfree_baggages": 0,
        }
    return {"users": users, "reservations": reservations, "flights": {}}


def make_tasks(seed: int = 0) -> list[Row]:
    """A cancellation that may be or not, a bag more, a name put right, for every reservation."""
    made: list[Row] = []
    for id, one in make_rows()["reservations"].items():
        user, (passenger,) = one["user_id"], one["passengers"]
        who = f"Your user id is {user}, your reservation is {id}."
        card = one["payment_history"][0]["payment_id"]
        others = [name for name in FIRST if name != passenger["first_name"]]
        renamed = {**passenger, "first_name": random.Random(f"{seed} {id}").choice(others)}
        bags = {"total_baggages": 2, "nonfree_baggages": 1, "payment_id": card}
        wishes: list[tuple[str, str, list[Row]]] = [
            (
                "cancel",
                "You want to cancel it.",
                [_act("cancel_reservation", id)] if one["cabin"] == "business" else [],
            ),
            ("bag", f"You want one more bag, paid with {card}.", [_act("update_reservation_baggages", id, **bags)]),
            (
                "name",
                f"The passenger's first name should be {renamed['first_name']}.",
                [_act("update_reservation_passengers", id, passengers=[renamed])],
            ),
        ]
        made += [
            {
                "id": f"{kind}-{id}",
                "scenario": f"{who} {wish}",
                "expected": [_act("get_reservation_details", id), *expected],
                "communicate": [],
            }
            for kind, wish, expected in wishes
        ]
    return made


def _act(name: str, id: str, **arguments: Any) -> Row:
    return {"name": name, "arguments": {"reservation_id": id, **arguments}}
