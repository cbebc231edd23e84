import re

from strop.tasks.sampling import evaluation, group, task_at
from strop.types import Task, stable_hash

TASKS = [Task(id=f"t{i}") for i in range(10)]


def test_every_epoch_has_every_task_once_in_an_order_of_its_own():
    epochs = [[task_at(TASKS, 7, e * 10 + n).id for n in range(10)] for e in range(5)]
    assert all(sorted(epoch) == [task.id for task in TASKS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_the_order_depends_on_the_seed_alone():
    order = [task_at(TASKS, 7, n).id for n in range(40)]
    assert [task_at(TASKS, 7, n).id for n in reversed(range(40))] == order[::-1]
    assert [task_at(TASKS, 8, n).id for n in range(40)] != order
    # fixed numbers: a resumed run of an older release must go on in the same order
    assert order[:5] == ["t5", "t7", "t2", "t1", "t9"]


def test_a_group():
    rollouts = group(TASKS, seed=7, n=12, members=3, max_attempts=4, suffix="~1")
    assert [r.id for r in rollouts] == ["g000012~1.0", "g000012~1.1", "g000012~1.2"]
    assert {r.group for r in rollouts} == {"g000012~1"}
    assert [r.member for r in rollouts] == [0, 1, 2]
    assert {r.task.id for r in rollouts} == {task_at(TASKS, 7, 12).id}
    assert [r.seed for r in rollouts] == [stable_hash(7, "train", 12, m) for m in range(3)]
    assert {(r.mode, r.max_attempts, r.status) for r in rollouts} == {("train", 4, "queued")}


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


def test_ids_stand_in_addresses_and_differ():
    splits = ["a/b", "a b", "a_b", "ä?"]
    ids = [
        evaluation([Task(id="x", split=s)], seed=7, version="1.0", step=0, split=s, greedy=False)[0].id for s in splits
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9.~_-]+", id) for id in ids)
    assert len(set(ids)) == len(ids)
