"""Games: three of the demo's questions each. What is held out shares no pair of operands with what is trained on."""

from itertools import count

from strop import Task, demo

QUESTIONS = 3


def tasks(games: int = 400) -> list[Task]:
    """`games` that are held out, and four times as many to train on."""
    wanted = {"train": 4 * games, "test": games}
    questions: dict[str, list[dict[str, object]]] = {split: [] for split in wanted}
    for seed in count():
        if all(len(questions[split]) >= QUESTIONS * number for split, number in wanted.items()):
            break
        for task in demo.tasks(seed=seed):
            if task.split in questions:
                questions[task.split].append(task.data)
    return [
        Task(id=f"{split}-{n:04d}", split=split, data={"questions": questions[split][QUESTIONS * n :][:QUESTIONS]})
        for split, number in wanted.items()
        for n in range(number)
    ]
