"""What a repair is worth: the agent has ended, and its package is called in a sandbox where neither the agent nor the
results are.

reward     the share of the hidden tests whose result is right
fixed      1 if all are
answered   1 if the program ended well. Answers that are cut off at their length it gives up on after some: what a model
           that knows nothing can learn (laptop.toml)
"""

import functools
from typing import Any

from repairs import BY_NAME, Package

from strop import Task
from strop.tools.python import PythonBox

SECONDS = 5.0


@functools.cache
def _box() -> PythonBox:
    return PythonBox(seconds=SECONDS)


def score(task: Task, answer: dict[str, Any]) -> dict[str, float]:
    package = BY_NAME[task.data["package"]]
    share = share_right(package, answer["files"].get(f"{package.name}.py", ""))
    return {"reward": share, "fixed": float(share == 1.0), "answered": float(answer["code"] == 0)}


def share_right(package: Package, source: str) -> float:
    """How many of the hidden tests come to what the right source comes to. What that is stays out here, where the
    repaired source cannot find it."""
    with _box().tool() as python:
        said = [python(f"exec({source!r})\nprint(repr(({call})))") for call in package.hidden]
    right = [
        text.strip().rpartition("\n")[2] == package.result(call)
        for text, call in zip(said, package.hidden, strict=True)
    ]
    return sum(right) / len(right)
