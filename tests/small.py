"""The demo's tasks, so few of them that a small run's fourth step begins them anew."""

from strop import demo
from strop.types import Task


def tasks(kind: str = "calc") -> list[Task]:
    found = demo.tasks(kind)
    return [t for t in found if t.split == "train"][:14] + [t for t in found if t.split == "test"][:8]
