"""Numbers that say who answers in a rollout, always the same ones."""

from __future__ import annotations

from strop.types import Rollout, stable_hash


def draw_number(rollout: Rollout, who: str, what: str = "outside") -> float:
    """A number from 0 to 1 for an agent or a policy in a rollout, always the same. The members of a group share it,
    since they are compared with each other, and so do all evaluations of a task.

    >>> from msgspec.structs import replace
    >>> from strop.types import Task
    >>> one = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), created=0.0)
    >>> draw_number(one, "a") == draw_number(replace(one, id="g1.1", member=1, seed=9), "a") != draw_number(one, "b")
    True
    """
    drawn_by = rollout.group.partition("~")[0] if rollout.mode == "train" else rollout.task.id
    return stable_hash(what, drawn_by, who) / 2**63
