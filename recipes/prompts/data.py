"""Room-booking tasks: those of Agent Lightning (`--data apo_room_tasks.jsonl`), or as many made up here.

A third of them is for learning, a third tells which version is best, and a third is held out.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rooms import DAY, choose, list_rooms

from strop import Task

SPLITS = ("train", "validation", "test")
NEEDS = ("projector", "whiteboard", "confphone", "tv", "ledwall")


def tasks(data: str = "", count: int = 57) -> list[Task]:
    rows = read_file(Path(data)) if data else make_up(count)
    return [
        Task(id=row["id"], split=SPLITS[n % 3], data={"wanted": row["task_input"], "expected": row["expected_choice"]})
        for n, row in enumerate(rows)
    ]


def read_file(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def make_up(count: int) -> list[dict[str, Any]]:
    """Tasks of the same shape, with the right choice."""
    draw, rows = random.Random(7), list[dict[str, Any]]()
    for n in range(count):
        wanted = {
            "date": DAY,
            "time": f"{draw.randrange(9, 17):02d}:{draw.choice((0, 15, 30, 45)):02d}",
            "duration_min": draw.choice((20, 30, 45, 60)),
            "attendees": draw.randrange(2, 13),
            "needs": draw.sample(NEEDS, draw.randrange(3)),
            "accessible_required": draw.random() < 0.6,
        }
        rooms = list_rooms(wanted["date"], wanted["time"], wanted["duration_min"])
        rows.append({"id": f"made-{n}", "task_input": wanted, "expected_choice": choose(wanted, rooms)})
    return rows
