"""The demo's tasks, fewer of them."""

from strop import demo
from strop.types import Task


def tasks(kind: str = "calc") -> list[Task]:
    found = demo.tasks(kind)
    return [t for t in found if t.split == "train"][:64] + [t for t in found if t.split == "test"][:8]
