"""Games to play: a task is a seed, from which names, seats, roles and orders come. Nothing is downloaded.

tasks(games=256, language="zh")      in Chinese
"""

from typing import Any

from strop import Task
from strop.errors import TaskError

LANGUAGES = ("en", "zh")


def tasks(
    data: str = "made",
    games: int = 256,
    test: int = 16,
    language: str = "en",
    days: int = 6,
    speeches: int = 1,
    pack_rounds: int = 2,
    context: int = 0,
    seconds: float = 120.0,
    examples: bool = False,
) -> list[Task]:
    """`games` to train on and `test` others. `days`, `speeches` and `pack_rounds` are the rules' (game.py).

    `context` is policy.context, so that players forget in time; 0: once the gateway refuses a prompt. `seconds` is how
    long a player may take. `examples` shows players some answers first, for models that do not find the form by
    themselves.

    >>> one = tasks(games=1, test=0)[0]
    >>> one.id, one.data["rules"]
    ('game-0', {'days': 6, 'speeches': 1, 'pack_rounds': 2})
    """
    if data != "made":
        raise TaskError(f"werewolf has no data {data!r}, only seeds. Fix: leave --data out, and set tasks_args.games")
    if language not in LANGUAGES:
        raise TaskError(f"there are no prompts in {language!r}. Fix: take one of {', '.join(LANGUAGES)}")
    rules = {"days": days, "speeches": speeches, "pack_rounds": pack_rounds}
    common: dict[str, Any] = {
        "language": language, "rules": rules, "examples": examples, "context": context, "seconds": seconds,
    }  # fmt: skip
    return [
        Task(id=f"game-{seed}", split="train" if seed < games else "test", data={"seed": seed, **common})
        for seed in range(games + test)
    ]
