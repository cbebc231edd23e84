"""What a solution is worth, as the service tells it: it knows neither the right answer nor that it is being trained."""

from typing import Any

from strop.rewards import last_number
from strop.types import Task


def score(task: Task, solved: dict[str, Any]) -> dict[str, float]:
    """1 for the right answer. Short of that, 0.1 for calculating anything at all, and up to 0.5 more for the share of
    the solution's results that the calculator came by. Without an answer there is nothing: a model that is paid for
    calculating alone learns never to stop.

    >>> task = Task(id="t", data={"question": "", "results": ["24", "72"], "answer": "72"})
    >>> score(task, {"answer": "I guess 70", "calculations": [{"expression": "48 / 2 + 46", "steps": ["24", "70"]}]})
    {'reward': 0.35, 'right': 0.0, 'calculated': 1.0}
    """
    results = [step for call in solved["calculations"] for step in call["steps"]]
    right = same(last_number(solved["answer"]), task.data["answer"])
    needed = task.data["results"]
    found = sum(any(same(result, one) for result in results) for one in needed)
    share = found / len(needed) if needed else 0.0
    calculated = float(bool(results))
    return {
        "reward": float(right) or (0.1 * calculated + 0.5 * share if solved["answer"].strip() else 0.0),
        "right": float(right),
        "calculated": calculated,
    }


def same(given: str | None, golden: str) -> bool:
    try:
        return given is not None and abs(float(given) - float(golden)) < 1e-6
    except ValueError:
        return False
