"""What a game is worth: to each player by itself, and as a whole to look at.

win          of a player: 1 if its side won
format       of a player: the share of its answers that could be read; half for those that lack the form asked for
violations   of a player: minus the share of its answers that broke a rule
aim          of a wolf: the share of its votes by day that were for somebody who is no wolf
judge        of a player: what a judge thinks of its speeches, 0 to 1; only with `judged`
reward       of the game: 1 if the wolves won, for win rates. Counted (`algorithm.rewards`), it would teach the village
             to lose
readable     of the game: `format` over all answers

A player that was never asked, or that an outside model played, gets nothing: there is nothing to train.
"""

import os
from functools import cache
from typing import Any

from strop import Reward, Task
from strop.errors import ConfigError
from strop.rewards import Judge

PROMPT = (
    "In a game of werewolf a player said the following by day, one speech to a line.\n"
    "Role and result: {question}\n\n{answer}\n\n"
    "How well do these speeches serve the player's own side: do they say something definite, fit together, and keep "
    "what should stay hidden? Reply with a number from 0 to 1."
)


def score(task: Task, game: dict[str, Any]) -> list[Reward]:
    """
    >>> wolf = {"role": "wolf", "won": True, "asked": 4, "form": 3.0, "violations": 1, "outside": False}
    >>> wolf |= {"votes": 2, "aimed": 1}
    >>> for one in score(Task(id="t"), {"winner": "wolves", "players": {"wolf-1": wolf}}):
    ...     print(one.agent, one.name, one.value)
    None reward 1.0
    None readable 0.75
    wolf-1 win 1.0
    wolf-1 format 0.75
    wolf-1 violations -0.25
    wolf-1 aim 0.5
    """
    trained = trained_players(game)
    asked = sum(player["asked"] for player in trained.values())
    given = [
        Reward(name="reward", value=float(game["winner"] == "wolves")),
        Reward(name="readable", value=sum(player["form"] for player in trained.values()) / max(asked, 1)),
    ]
    for agent, player in trained.items():
        given += [
            Reward(name="win", value=float(player["won"]), agent=agent),
            Reward(name="format", value=player["form"] / player["asked"], agent=agent),
            Reward(name="violations", value=-player["violations"] / player["asked"], agent=agent),
        ]
        if player["role"] == "wolf" and player["votes"]:
            given.append(Reward(name="aim", value=player["aimed"] / player["votes"], agent=agent))
    return given


async def judged(task: Task, game: dict[str, Any]) -> list[Reward]:
    """The same, and what a judge thinks. For `reward = "recipes/werewolf/reward.py:judged"`."""
    given = score(task, game)
    for agent, player in trained_players(game).items():
        if speeches := "\n".join(filter(None, player["words"])):
            about = f"{player['role']}, {'won' if player['won'] else 'did not win'}"
            verdict = await judge().ask(about, speeches, "")
            if verdict.value is not None:  # a judge that is away costs a reward, not the game
                given.append(Reward(name="judge", value=verdict.value, agent=agent))
    return given


def trained_players(game: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in game["players"].items() if one["asked"] and not one["outside"]}


@cache
def judge() -> Judge:
    """JUDGE_URL is any server that speaks OpenAI's chat completions, JUDGE_MODEL its model, JUDGE_KEY its key."""
    if not (model := os.environ.get("JUDGE_MODEL")):
        raise ConfigError(
            "no judge is named. Fix: set JUDGE_MODEL to its model, JUDGE_URL to its server, JUDGE_KEY to its key"
        )
    return Judge(
        model,
        base_url=os.environ.get("JUDGE_URL", "https://api.openai.com/v1"),
        key_env="JUDGE_KEY",
        prompt=PROMPT,
        cache=os.environ.get("JUDGE_CACHE", "judge.sqlite"),
    )
