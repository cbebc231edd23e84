"""The demo's agent with a calculator that takes its time: mostly little, now and then very much."""

from __future__ import annotations

import random
import time
from typing import Any

from strop import demo
from strop.types import Task

SHORTEST, LONGEST = 0.1, 5.0


def agent(task: Task, llm: Any) -> dict[str, float]:
    if task.split == "train":  # evaluations are not what is timed
        time.sleep(seconds(random.random()))
    return demo.agent(task, llm)


def seconds(uniform: float) -> float:
    """A Pareto's tail, cut off: half of the calls take less than 0.2 s, one in thirty 3 s or more.

    >>> [round(seconds(u), 2) for u in (0.0, 0.5, 0.9, 0.97, 1.0)]
    [0.1, 0.2, 1.0, 3.33, 5.0]
    """
    return min(LONGEST, SHORTEST / max(1.0 - uniform, 1e-9))
