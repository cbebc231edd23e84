"""Tasks that name an environment of another system: rows kept aside, and what a task says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from strop.errors import AgentError, TaskError
from strop.types import Task

Row = TypeVar("Row")
Said = TypeVar("Said")


def read_task(task: Task, kind: type[Said], system: str, source: str) -> Said:
    """What a task says. Raises `AgentError` for one that was made for something else."""
    try:
        return msgspec.convert(task.data, kind)
    except msgspec.ValidationError as error:
        raise AgentError(
            f"task {task.id} names no environment of {system} ({error}). Fix: take tasks from {source}"
        ) from None


def split_rows(rows: Sequence[Row], held: int, what: str) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and the last `held`, to evaluate on. Raises `TaskError` where none were left to train on.

    >>> split_rows("abc", 1, "rows")
    (['a', 'b'], ['c'])
    """
    first = len(rows) - held
    if held < 0 or first <= 0 < held:
        raise TaskError(
            f"tasks_args.held is {held}, of {len(rows)} {what}, and some have to be left to train on. Fix: set it to "
            f"a number from 0 to {max(0, len(rows) - 1)}"
        )
    return list(rows[:first]), list(rows[first:])
