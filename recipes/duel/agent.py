"""A duel of two agents: both are asked the same questions, and who is right more often wins.

task      {"questions": [{"question": "What is 37 * 52?", "calls": ["37 * 52"], "answer": 1924}, ...]}
left      right, wrong, right
right     wrong, wrong, right
rewards   {"reward": 1.0}: left's score, 0.5 for a draw; and what each agent got: `score` 1.0 and 0.0, `points` 2 and 1

Whatever one gains the other loses. Neither sees what the other says, so the same words say nothing about a question:
no answer that is always given can win.
"""

from typing import Any

from strop import Task, demo

PLAYERS = ("left", "right")


def play(task: Task, llm: Any) -> float:
    points = {player: count_points(task, llm.as_agent(player)) for player in PLAYERS}
    left = score(points["left"], points["right"])
    for player, value in (("left", left), ("right", 1.0 - left)):
        llm.reward("score", value, agent=player)
        llm.reward("points", points[player], agent=player)
    return left


def count_points(task: Task, llm: Any) -> float:
    """How many questions one player answers with the calculator, and rightly."""
    asked = (Task(id=task.id, data=question) for question in task.data["questions"])
    return sum(demo.agent(one, llm)["reward"] for one in asked)


def score(ours: float, theirs: float) -> float:
    """1 for a win, 0.5 for a draw, 0 for a loss.

    >>> score(2, 1), score(1, 1), score(0, 3)
    (1.0, 0.5, 0.0)
    """
    return 0.5 if ours == theirs else float(ours > theirs)
