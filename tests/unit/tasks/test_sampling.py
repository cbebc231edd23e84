import re
import tracemalloc
from collections import Counter

import pytest

from strop.errors import ConfigError
from strop.tasks.sampling import choose_task, evaluation, group, hold_out
from strop.types import Retry, Task, stable_hash

TASKS = [Task(id=f"t{i}") for i in range(10)]


def test_every_epoch_has_every_task_once_in_an_order_of_its_own():
    epochs = [[choose_task(TASKS, 7, e * 10 + n).id for n in range(10)] for e in range(5)]
    assert all(sorted(epoch) == [task.id for task in TASKS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_the_order_depends_on_the_seed_alone():
    order = [choose_task(TASKS, 7, n).id for n in range(40)]
    assert [choose_task(TASKS, 7, n).id for n in reversed(range(40))] == order[::-1]
    assert [choose_task(TASKS, 8, n).id for n in range(40)] != order
    # fixed numbers: a resumed run of an older release must go on in the same order
    assert order[:5] == ["t5", "t7", "t2", "t1", "t9"]


def test_the_orders_of_many_epochs_take_little_memory():
    tasks = [TASKS[0]] * 100_000
    tracemalloc.start()
    for epoch in range(2):
        choose_task(tasks, 7, epoch * len(tasks))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 * 5 * len(tasks)


def test_what_is_held_out_depends_on_seed_and_ids_alone():
    tasks = [Task(id=f"t{i}") for i in range(1000)]
    held = hold_out(tasks, 0.1, seed=7)
    assert [task.id for task in held] == [task.id for task in tasks]
    chosen = {task.id for task in held if task.split == "test"}
    assert len(chosen) == 100
    assert {task.split for task in held} == {"train", "test"}
    assert {task.id for task in hold_out(tasks[::-1], 100, seed=7) if task.split == "test"} == chosen
    assert {task.id for task in hold_out(tasks, 0.1, seed=8) if task.split == "test"} != chosen
    more = {task.id for task in hold_out([*tasks, Task(id="new")], 100, seed=7) if task.split == "test"}
    assert len(more & chosen) >= 99
    # fixed names: a resumed run of an older release must not train on what was held out
    assert sorted(chosen)[:4] == ["t12", "t13", "t136", "t149"]


def test_only_train_tasks_are_held_out():
    tasks = [Task(id="a"), Task(id="b"), Task(id="c", split="test"), Task(id="d", split="long", data=1)]
    held = hold_out(tasks, 1, seed=7, split="kept")
    assert held[2:] == tasks[2:]
    assert Counter(task.split for task in held) == {"train": 1, "kept": 1, "test": 1, "long": 1}
    assert hold_out(tasks, 0, seed=7) == tasks
    assert Counter(task.split for task in hold_out(tasks, 0.01, seed=7))["test"] == 2  # one at least


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (10, r"hold_out is 10 and there are 10 tasks of split train\. Fix: leave at least one"),
        (0.99, r"hold_out is 0\.99 and there are 10 tasks"),
        (1.5, r"hold_out is 1\.5\. Fix: give a share below 1, or a whole number of tasks"),
        (-1, r"hold_out is -1\. Fix: give"),
        (float("nan"), r"hold_out is nan\. Fix: give"),
        (float("inf"), r"hold_out is inf\. Fix: give"),
    ],
)
def test_what_cannot_be_held_out(wanted: float, says: str):
    with pytest.raises(ConfigError, match=says):
        hold_out(TASKS, wanted, seed=7)


def test_a_group():
    rollouts = group(TASKS, seed=7, n=12, members=3, retries={"timeout": Retry(limit=4)}, suffix="~1")
    assert [r.id for r in rollouts] == ["g000012~1.0", "g000012~1.1", "g000012~1.2"]
    assert {r.group for r in rollouts} == {"g000012~1"}
    assert [r.member for r in rollouts] == [0, 1, 2]
    assert {r.task.id for r in rollouts} == {choose_task(TASKS, 7, 12).id}
    assert [r.seed for r in rollouts] == [stable_hash(7, "train", 12, m) for m in range(3)]
    assert {(r.mode, r.retries["timeout"].limit, r.status) for r in rollouts} == {("train", 4, "queued")}


def test_an_evaluation():
    tasks = [*TASKS, Task(id="x", split="test"), Task(id="y", split="test")]

    def make(version: str = "1.5", step: int = 5, greedy: bool = True):
        return evaluation(tasks, seed=7, version=version, step=step, split="test", greedy=greedy)

    rollouts = make()
    assert [r.id for r in rollouts] == ["e1.5-test-greedy.0000", "e1.5-test-greedy.0001"]
    assert [r.task.id for r in rollouts] == ["x", "y"]
    assert {r.mode for r in rollouts} == {"greedy"}
    assert {r.mode for r in make(greedy=False)} == {"eval"}
    assert make(greedy=False)[1].id == "e1.5-test-sampled.0001"
    assert {r.group for r in rollouts} == {"e1.5-test-greedy"}
    assert [r.seed for r in make("2.5")] == [r.seed for r in rollouts]  # a resumed run evaluates to the same numbers
    seeds = [r.seed for r in (*rollouts, *make(step=6), *make(greedy=False))]
    assert len(set(seeds)) == 6


def test_more_samples_of_each_task():
    tasks = [Task(id="x", split="test"), Task(id="y", split="test")]

    def make(samples: int):
        return evaluation(tasks, seed=7, version="1.0", step=0, split="test", greedy=False, samples=samples)

    once, thrice = make(1), make(3)
    # fixed numbers: a run of an older release that is resumed must find its evaluations
    assert [r.id for r in once] == ["e1.0-test-sampled.0000", "e1.0-test-sampled.0001"]
    assert [r.seed for r in once] == [stable_hash(7, "eval", 0, "test", "sampled", id) for id in "xy"]
    assert [(r.id, r.seed) for r in thrice[::3]] == [(r.id, r.seed) for r in once]
    assert [r.task.id for r in thrice] == list("xxxyyy")
    assert [r.member for r in thrice] == list(range(6))
    assert {r.group for r in thrice} == {once[0].group}
    assert len({r.seed for r in thrice}) == len({r.id for r in thrice}) == 6
    assert [r.seed for r in make(2)] == [r.seed for r in thrice if r.member % 3 < 2]


def test_ids_stand_in_addresses_and_differ():
    splits = ["a/b", "a b", "a_b", "ä?"]
    ids = [
        evaluation([Task(id="x", split=s)], seed=7, version="1.0", step=0, split=s, greedy=False)[0].id for s in splits
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9.~_-]+", id) for id in ids)
    assert len(set(ids)) == len(ids)
