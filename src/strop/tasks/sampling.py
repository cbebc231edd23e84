"""Which tasks are kept aside, which one is next, and the rollouts of a group. Pure functions of the run's seed and a
count, so that a resumed run goes on exactly where it was without any state of its own."""

from __future__ import annotations

import math
import random
import re
import time
from array import array
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from strop.errors import ConfigError
from strop.types import RETRIES, Cause, Mode, Retry, Rollout, Task, stable_hash


def choose_task(tasks: Sequence[Task], seed: int, n: int) -> Task:
    """The task of the n-th group (from 0): every task once per epoch, each epoch in an order of its own.

    >>> tasks = [Task(id="a"), Task(id="b"), Task(id="c")]
    >>> sorted(choose_task(tasks, 7, n).id for n in (3, 4, 5))
    ['a', 'b', 'c']
    """
    epoch, place = divmod(n, len(tasks))
    return tasks[_order(len(tasks), seed, epoch)[place]]


@lru_cache(maxsize=8)
def _order(num_tasks: int, seed: int, epoch: int) -> Sequence[int]:
    order = array("I", range(num_tasks))  # 4 bytes each: an epoch of a million tasks takes 4 MB, as a tuple 40
    random.Random(stable_hash(seed, "epoch", epoch)).shuffle(order)
    return order


def hold_out(tasks: Sequence[Task], fraction_or_count: float, *, seed: int, split: str = "test") -> list[Task]:
    """The same tasks, a share (below 1) or a number of those of split train moved to `split`.

    Which ones depends on the seed and their ids, not on their order. A task that is added later moves at most one.

    >>> [task.split for task in hold_out([Task(id="a"), Task(id="b"), Task(id="c"), Task(id="d")], 0.25, seed=7)]
    ['test', 'train', 'train', 'train']
    """
    train = [task.id for task in tasks if task.split == "train"]
    count = _count(fraction_or_count, len(train))
    chosen = set(sorted(train, key=lambda id: (stable_hash(seed, "hold out", id), id))[:count])
    return [
        msgspec.structs.replace(task, split=split) if task.split == "train" and task.id in chosen else task
        for task in tasks
    ]


def _count(fraction_or_count: float, num_train: int) -> int:
    if fraction_or_count == 0:
        return 0
    if 0 < fraction_or_count < 1:
        count = max(1, round(fraction_or_count * num_train))
    elif 1 <= fraction_or_count < math.inf and fraction_or_count == int(fraction_or_count):
        count = int(fraction_or_count)
    else:
        raise ConfigError(f"hold_out is {fraction_or_count}. Fix: give a share below 1, or a whole number of tasks")
    if count >= num_train:
        raise ConfigError(
            f"hold_out is {fraction_or_count:g} and there are {num_train} tasks of split train. Fix: leave at least one"
        )
    return count


def group(
    tasks: Sequence[Task], *, seed: int, n: int, members: int, retries: dict[Cause, Retry] = RETRIES, suffix: str = ""
) -> list[Rollout]:
    """The rollouts of the n-th group. `suffix` tells a group that is sampled anew from the one it replaces.

    >>> [r.id for r in group([Task(id="a")], seed=7, n=3, members=2)]
    ['g000003.0', 'g000003.1']
    """
    task, name, now = choose_task(tasks, seed, n), f"g{n:06d}{suffix}", time.time()
    return [
        Rollout(
            id=f"{name}.{member}",
            group=name,
            member=member,
            task=task,
            seed=stable_hash(seed, "train", n, member),
            retries=retries,
            created=now,
        )
        for member in range(members)
    ]


def group_number(rollout: str) -> int:
    """Which group a rollout of training belongs to, from its id.

    >>> group_number("g000003.1"), group_number("g1000000~2.0")
    (3, 1000000)
    """
    found = re.match(r"g(\d+)", rollout)
    assert found, f"{rollout} is not a rollout of training"
    return int(found[1])


def evaluation(
    tasks: Sequence[Task],
    *,
    seed: int,
    version: str,
    step: int,
    split: str,
    greedy: bool,
    samples: int = 1,
    retries: dict[Cause, Retry] = RETRIES,
) -> list[Rollout]:
    """`samples` rollouts per task of `split`, task by task, all of one group. Seeds depend on the step, the task and
    the sample, not on the lineage, so that a resumed run evaluates to the same numbers. A task's first sample is the
    same however many there are.

    >>> [r.id for r in evaluation([Task(id="a")], seed=7, version="1.5", step=5, split="train", greedy=True)]
    ['e1.5-train-greedy.0000']
    >>> [r.id for r in evaluation([Task(id="a")], seed=7, version="1.5", step=5, split="train", greedy=True, samples=2)]
    ['e1.5-train-greedy.0000', 'e1.5-train-greedy.0000.1']
    """
    kind, now = "greedy" if greedy else "sampled", time.time()
    # Ids stand in addresses: anything else in a split's name is written as ~ and its code.
    safe = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"~{ord(found[0]):x}", split)
    name = f"e{version}-{safe}-{kind}"
    return [
        Rollout(
            id=f"{name}.{k:04d}.{sample}" if sample else f"{name}.{k:04d}",
            group=name,
            member=k * samples + sample,
            task=task,
            mode="greedy" if greedy else "eval",
            seed=stable_hash(seed, "eval", step, split, kind, task.id, *([sample] if sample else [])),
            retries=retries,
            created=now,
        )
        for k, task in enumerate(task for task in tasks if task.split == split)
        for sample in range(samples)
    ]


def queue(
    tasks: Sequence[Task],
    *,
    name: str,
    members: int = 1,
    mode: Mode = "eval",
    seed: int = 0,
    retries: dict[Cause, Retry] = RETRIES,
) -> list[Rollout]:
    """Rollouts of tasks outside of any run: a group per task, in the order of the tasks. The same name makes the same
    ids and seeds.

    >>> [r.id for r in queue([Task(id="a"), Task(id="b")], name="try", members=2)]
    ['try-000000.0', 'try-000000.1', 'try-000001.0', 'try-000001.1']
    """
    now = time.time()
    return [
        Rollout(
            id=f"{name}-{n:06d}.{member}",
            group=f"{name}-{n:06d}",
            member=member,
            task=task,
            mode=mode,
            seed=stable_hash(seed, "queue", name, n, member),
            retries=retries,
            created=now,
        )
        for n, task in enumerate(tasks)
        for member in range(members)
    ]
