"""The demo's agent, which nobody pays."""

from typing import Any

from strop import demo
from strop.types import Task


def agent(task: Task, llm: Any) -> None:
    demo.agent(task, llm)
