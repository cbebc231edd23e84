"""Which task is next, and the rollouts of a group. Pure functions of the run's seed and a count, so that a resumed run
goes on exactly where it was without any state of its own."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from functools import lru_cache

from strop.types import Rollout, Task, stable_hash


def task_at(tasks: Sequence[Task], seed: int, n: int) -> Task:
    """The task of the n-th group (from 0): every task once per epoch, each epoch in an order of its own.

    >>> tasks = [Task(id="a"), Task(id="b"), Task(id="c")]
    >>> sorted(task_at(tasks, 7, n).id for n in (3, 4, 5))
    ['a', 'b', 'c']
    """
    epoch, place = divmod(n, len(tasks))
    return tasks[_order(len(tasks), seed, epoch)[place]]


@lru_cache(maxsize=8)
def _order(num_tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_tasks))
    random.Random(stable_hash(seed, "epoch", epoch)).shuffle(order)
    return tuple(order)


def group(
    tasks: Sequence[Task], *, seed: int, n: int, members: int, max_attempts: int = 2, suffix: str = ""
) -> list[Rollout]:
    """The rollouts of the n-th group. `suffix` tells a group that is sampled anew from the one it replaces.

    >>> [r.id for r in group([Task(id="a")], seed=7, n=3, members=2)]
    ['g000003.0', 'g000003.1']
    """
    task, name, now = task_at(tasks, seed, n), f"g{n:06d}{suffix}", time.time()
    return [
        Rollout(
            id=f"{name}.{member}",
            group=name,
            member=member,
            task=task,
            seed=stable_hash(seed, "train", n, member),
            max_attempts=max_attempts,
            created=now,
        )
        for member in range(members)
    ]


def evaluation(
    tasks: Sequence[Task], *, seed: int, version: str, step: int, split: str, greedy: bool, max_attempts: int = 2
) -> list[Rollout]:
    """One rollout per task of `split`, all of one group. Seeds depend on the step and the task, not on the lineage, so
    that a resumed run evaluates to the same numbers.

    >>> [r.id for r in evaluation([Task(id="a")], seed=7, version="1.5", step=5, split="train", greedy=True)]
    ['e1.5-train-greedy.0000']
    """
    kind, now = "greedy" if greedy else "sampled", time.time()
    # Ids stand in addresses: anything else in a split's name is written as ~ and its code.
    safe = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"~{ord(found[0]):x}", split)
    name = f"e{version}-{safe}-{kind}"
    return [
        Rollout(
            id=f"{name}.{k:04d}",
            group=name,
            member=k,
            task=task,
            mode="greedy" if greedy else "eval",
            seed=stable_hash(seed, "eval", step, split, kind, task.id),
            max_attempts=max_attempts,
            created=now,
        )
        for k, task in enumerate(task for task in tasks if task.split == split)
    ]
