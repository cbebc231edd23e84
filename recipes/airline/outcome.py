"""What a conversation was worth, as tau2-bench counts it: 1 where the database is what it should be and the user was
told what they had to be told, else 0.

    score(rows, task, changes, said, calls)
    {"reward": 1.0, "database": 1.0, "told": 1.0, "actions": 1.0}

What the database should be is found by doing the task's expected actions. `actions` is the share of them that the agent
took, in any order: for models that never do all (`algorithm.rewards.actions`). What tau2-bench leaves to a judge
(`nl_assertions`) is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from airline_tools import CHANGES, AirlineTools
from database import Database, Row, Rows

from strop.agent.toolbox import Tools, find_tools
from strop.errors import TaskError


async def score(
    rows: Rows,
    task: Mapping[str, Any],
    changes: dict[tuple[str, str], Row],
    said: Sequence[str],
    calls: Sequence[tuple[str, Any]] = (),
) -> dict[str, float]:
    """`changes` is what the conversation changed in `rows`, `said` what the agent said to the user, `calls` its tool
    calls, as names and arguments."""
    same = float(changes == await expect(rows, task["expected"]))
    heard = " ".join(said).lower().replace(",", "")
    told = float(all(fact.lower().replace(",", "") in heard for fact in task["communicate"]))
    expected = [(action["name"], action["arguments"]) for action in task["expected"]]
    taken = sum(action in calls for action in expected) / len(expected) if expected else 1.0
    return {"reward": same * told, "database": same, "told": told, "actions": taken}


async def expect(rows: Rows, actions: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Row]:
    """What the actions change. Raises `TaskError` where one cannot be done: the task does not fit the database."""
    database = Database(rows)
    tools = Tools(find_tools(AirlineTools(database)))
    for action in actions:
        done = await tools.run(action["name"], json.dumps(action["arguments"]))
        if not done.ok and action["name"].startswith(CHANGES):
            raise TaskError(f"{action['name']}, which a task expects, cannot be done: {done.text}. Fix: see db.json")
    return database.changes()
