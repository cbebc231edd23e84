"""Calculations; how they are asked for is the prompt's business."""

from __future__ import annotations

import random

from strop import Task, demo


def tasks(train: int = 400, validation: int = 48, test: int = 128) -> list[Task]:
    draw, found = random.Random(11), list[Task]()
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        while sum(task.split == split for task in found) < count:
            a, b = (draw.randrange(10, draw.choice((100, 1000))) for _ in "ab")
            if demo.held_out(a, b) == (split == "test"):
                calculation = demo.calc("{x}", a, b, draw)
                data = {"symbols": calculation.pop("question"), **calculation}
                found.append(Task(id=f"{split}-{len(found)}", split=split, data=data))
    return found
