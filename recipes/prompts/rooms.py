"""The meeting rooms of the room-booking tasks, what is free when, and which room is right.

The inventory is that of Agent Lightning's room tasks, whose expected choices follow from it. A room is right if it is
free for the whole slot, seats everybody, has all that is needed and is accessible where it must be; of several the one
with the fewest empty seats, then the least equipment that nobody needs, then the nearest, then the least booked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

DAY = "2025-10-13"
NONE = "No Room"


class Room(NamedTuple):
    name: str
    seats: int
    equipment: tuple[str, ...]
    accessible: bool
    metres: int
    booked: tuple[tuple[str, int], ...]


ROOMS = (
    Room("Orion", 4, ("tv", "whiteboard"), True, 12, (("10:00", 60), ("15:00", 30))),
    Room("Lyra", 10, ("projector", "whiteboard", "confphone"), True, 30, (("09:30", 30), ("11:00", 60))),
    Room("Vega", 6, ("tv",), False, 22, (("14:00", 60),)),
    Room("Nova", 12, ("ledwall", "whiteboard", "confphone"), True, 45, ()),
    Room("Quark", 8, ("projector", "whiteboard"), False, 18, (("10:30", 30),)),
    Room("Atlas", 6, ("projector", "whiteboard"), True, 10, (("09:00", 30), ("13:30", 30))),
    Room("Pulse", 8, ("tv", "whiteboard", "confphone"), True, 8, (("16:30", 30),)),
)
RULES = ("free", "seats", "equipment", "accessible", "none", "slack", "extra", "distance", "bookings")
"""What can be looked at: five conditions, and four ways to choose among what is left, in this order."""


def list_rooms(date: str, time: str, duration_min: int) -> list[dict[str, Any]]:
    """Every room, and whether it is free for the whole slot: what the agent's tool says."""
    return [
        {
            "name": room.name,
            "capacity": room.seats,
            "equipment": list(room.equipment),
            "accessible": room.accessible,
            "distance_m": room.metres,
            "bookings_that_day": len(room.booked) if date == DAY else 0,
            "free": date != DAY or not any(_overlap(time, duration_min, *booked) for booked in room.booked),
        }
        for room in ROOMS
    ]


def choose(wanted: Mapping[str, Any], rooms: Sequence[Mapping[str, Any]], rules: Sequence[str] = RULES) -> str:
    """The room that follows from some of the rules. Without the rule `none`, something is booked in any case."""
    needs = set(wanted["needs"])
    fits = [
        room
        for room in rooms
        if ("free" not in rules or room["free"])
        and ("seats" not in rules or room["capacity"] >= wanted["attendees"])
        and ("equipment" not in rules or needs <= {*room["equipment"]})
        and ("accessible" not in rules or room["accessible"] or not wanted["accessible_required"])
    ]
    if not fits and "none" in rules:
        return NONE
    orders = {
        "slack": lambda room: abs(room["capacity"] - wanted["attendees"]),
        "extra": lambda room: len(room["equipment"]) - len(needs),
        "distance": lambda room: room["distance_m"],
        "bookings": lambda room: room["bookings_that_day"],
    }
    return min(fits or rooms, key=lambda room: [order(room) for name, order in orders.items() if name in rules])["name"]


def _overlap(start: str, minutes: int, other: str, other_minutes: int) -> bool:
    first, second = _minutes(start), _minutes(other)
    return max(first, second) < min(first + minutes, second + other_minutes)


def _minutes(clock: str) -> int:
    return 60 * int(clock[:2]) + int(clock[3:])
