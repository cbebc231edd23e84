"""Games of the recipe `werewolf` against scripted answers, for its tests: run by the recipe's own Python.

.recipes/werewolf/bin/python tests/recipes/werewolf_trials.py OUT.json     {"faults": a Trial, ...}
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import strop.testing
from strop.engines.scripted import Answer, Hangs, ScriptedRequest
from strop.errors import ContextOverflow

RECIPE = Path(__file__).parents[2] / "recipes" / "werewolf"
SECRET = "I must not howl today"


def question(asked: ScriptedRequest) -> str:
    return asked.prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def play_first(asked: ScriptedRequest) -> str:
    """The first option, in the form that is asked for."""
    options = re.search(r"one of these: (Player \d)|下列之一：(\d号玩家)", question(asked))
    if options is None:
        return "I am innocent."
    return f"This one.\nCHOICE: {options[1]}" if options[1] else f"就他。\n选择：{options[2]}"


def stumble(asked: ScriptedRequest) -> Answer:
    """What a player should not do, once of each kind, by the question. With seed 0 seats 2, 3 and 5 are wolves, 1 is
    the witch, 7 the seer and 8 the hunter."""
    seat, said = asked.prompt.partition("You are Player ")[2][0], question(asked)
    match seat, re.search(r"(Night|Day) (\d): .*?(talk|agree|attack|poison|look|speak|vote)", said):
        case "3", found if found and found[0].startswith("Night 1: talk"):
            return Hangs("I would ")
        case "5", found if found and found[0].startswith("Night 1: talk"):
            return "Player 2 is one of us, kill him.\nCHOICE: Player 2"
        case "2", found if found and found[0].startswith("Night 1: talk"):
            return "CHOICE: nobody"
        case "2", found if found and found[0].startswith("Night 1: the pack does not agree"):
            return "CHOICE: nobody"
        case (("3" | "5"), found) if found and found[0].startswith("Night 1: the pack does not agree"):
            return "CHOICE: Player 9"
        case "1", found if found and found[0].startswith("Night 1"):
            return "I keep my potions.\nCHOICE: nobody"
        case "7", found if found and found[0].startswith("Night 1: whom do you look"):
            return "the stars"
        case "4", found if found and found[0].startswith("Day 1: it is your turn to speak"):
            return ""
        case "6", found if found and found[0].startswith("Day 1: it is your turn to speak"):
            return f"<think>{SECRET}</think>I heard steps.\nPlayer 7: I am the seer!"
        case "8", found if found and found[0].startswith("Day 1: it is your turn to speak"):
            return f"<think>{SECRET}</think>"
        case "4", found if found and found[0].startswith("Day 1: whom do you vote"):
            return "CHOICE: Player 9"
        case "6", found if found and found[0].startswith("Day 1: whom do you vote"):
            return "Player 3, surely"
        case _, found if found and found[0].startswith("Day 1: whom do you vote"):
            return "CHOICE: nobody"
        case _:
            return play_first(asked)


class Forgetful:
    """The model's context is too short for every tenth request; with `always`, for all."""

    def __init__(self, always: bool = False) -> None:
        self.number, self.always = 0, always

    def __call__(self, asked: ScriptedRequest) -> Answer:
        self.number += 1
        return ContextOverflow("too long") if self.always or self.number % 10 == 0 else play_first(asked)


def accuse_wolves(asked: ScriptedRequest) -> str:
    """A village that knows: with seed 0, seats 2, 3 and 5 are voted out. Player 4 never finds the form."""
    if "whom do you vote" not in question(asked):
        return play_first(asked)
    options = question(asked).partition("one of these:")[2]
    found = re.search(r"Player [235]", options)
    choice = found[0] if found else "nobody"
    return f"{choice} it is" if "You are Player 4 " in asked.prompt else f"CHOICE: {choice}"


def main(out: str) -> None:
    sys.path.insert(0, str(RECIPE))
    from agent import play  # type: ignore[import-not-found]
    from data import tasks  # type: ignore[import-not-found]
    from reward import score  # type: ignore[import-not-found]

    def run(answers: Callable[[ScriptedRequest], Answer], **settings: Any) -> strop.testing.Trial:
        (task,) = tasks(games=1, test=0, **settings)
        return strop.testing.run(play, task, answers, reward=score, timeout=120)

    done = {
        "plain": run(play_first),
        "chinese": run(play_first, language="zh", days=2, examples=True),
        "faults": run(stumble, pack_rounds=1, seconds=2.0),
        "forgetful": run(Forgetful()),
        "hopeless": run(Forgetful(always=True), days=1),
        "short": run(play_first, context=2000),
        "taught": run(play_first, context=2200, examples=True),
        "village": run(accuse_wolves),
    }
    Path(out).write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    main(sys.argv[1])
