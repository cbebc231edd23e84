"""A finished game as a play: acts, scenes, speakers, and what is done in the dark as stage directions.

    python recipes/werewolf/play.py RUN ROLLOUT               print one
    python recipes/werewolf/play.py RUN ROLLOUT --thoughts    with what the players thought but did not say
    python recipes/werewolf/play.py RUN                       write the last three games to RUN/plays

Directions are in English; players speak their own language.
"""

import argparse
import asyncio
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reading import drop_thoughts

from strop.cli.rollouts import open_run
from strop.printable import escape_text
from strop.types import Event, Rollout, Turn

FEW = 3
ROMAN = {10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
ROLE = {
    "wolf": "a werewolf",
    "villager": "a villager",
    "seer": "the seer",
    "witch": "the witch",
    "hunter": "the hunter",
}


def write_play(rollout: Rollout, turns: Sequence[Turn], events: Sequence[Event], thoughts: bool = False) -> str:
    """The play as text. A game that broke off ends where it did, and says why."""
    scenes = [event.data for event in events if event.kind == "message" and "scene" in event.data]
    lines = [f"WEREWOLF, a play in {_acts(scenes)}", f"(game {rollout.task.id}, rollout {rollout.id})"]
    if scenes and scenes[0]["scene"] == "cast":
        lines += ["", "PERSONS", *_persons(scenes[0], {turn.agent: turn.policy for turn in turns if turn.outside})]
    answers = {turn.id: turn.answer for turn in turns} if thoughts else {}
    for scene in scenes:
        lines += _aside(_name(scene.get("seat")), answers.pop(scene.get("turn") or "", {}))
        lines += _stage(scene)
    if not scenes or scenes[-1]["scene"] != "end":
        lines += ["", f"The play breaks off ({rollout.status}{f', {rollout.cause}' if rollout.cause else ''})."]
    return "\n".join(lines) + "\n"


def _persons(cast: dict[str, Any], outside: dict[str, str]) -> Iterator[str]:
    """`outside`: who was played by which outside model."""
    for seat, agent in cast["players"].items():
        played = f", played by {outside[agent]}" if agent in outside else ""
        yield f"    Player {seat}, {ROLE[agent.partition('-')[0]]} ({agent}{played})"


def _stage(scene: dict[str, Any]) -> Iterator[str]:
    """The lines of one thing that happened."""
    who, whom = _name(scene.get("seat")), _name(scene.get("choice"))
    match scene["scene"]:
        case "night":
            yield from ("", f"ACT {_roman(scene['day'])}", "", "Scene 1. Night.", "")
        case "plan":
            chosen = f" (pointing at {whom})" if scene["choice"] is not None else ""
            yield from _speech(f"{who}, whispering{chosen}", scene["words"])
        case "hunt":
            yield _direction(f"The werewolves fall upon {whom}.")
        case "heal":
            yield _direction(f"The witch brings {whom} back to life.")
        case "poison":
            yield _direction(f"The witch pours poison into the cup of {whom}.")
        case "check":
            yield _direction(f"The seer looks at {whom} and sees a {'werewolf' if scene['wolf'] else 'good soul'}.")
        case "dawn":
            dead = [f"{_name(int(seat))} ({how})" for seat, how in scene["how"].items()]
            found = f"Dead: {', '.join(dead)}." if dead else "Nobody has died."
            yield from ("", "Scene 2. Day.", "", _direction(f"The sun rises. {found}"))
        case "speak":
            yield from _speech(who, scene["words"])
        case "vote":
            votes = [f"{_name(int(voter))} for {_name(choice)}" for voter, choice in scene["ballots"].items()]
            yield _direction(f"They vote: {', '.join(votes)}.")
        case "tie":
            yield _direction(f"A tie between {', '.join(map(_name, scene['seats']))}. They vote again.")
        case "verdict":
            gone = ", ".join(map(_name, scene["dead"]))
            yield _direction(f"{gone} is led away." if gone else "Nobody is led away.")
        case "shoot":
            yield _direction(f"{who}, the hunter, shoots {whom}.")
        case "fault":
            instead = f"; {_name(scene['instead'])} it is" if scene["what"] != "speak" else ""
            yield _direction(f"{who} falters ({scene['what']}: {scene['why']}){instead}.")
        case "cut":
            yield _direction(f"{who} forgets how it all began.")
        case "end":
            won = {"wolves": "The werewolves have won.", "village": "The village has won."}
            yield from ("", won.get(scene["winner"], "Nobody has won."), "", "CURTAIN")
        case _:
            pass


def _speech(who: str, words: str) -> Iterator[str]:
    yield from (who.upper() + ".", *_wrapped(words or "...", "    "))


def _aside(who: str, answer: dict[str, Any]) -> Iterator[str]:
    """What was thought: what the gateway told apart, and what the text still had of it."""
    text = answer.get("content") or ""
    parts = [answer.get("reasoning_content") or "", *re.findall(r"<think>(.*?)(?:</think>|$)", text, re.DOTALL)]
    thought = " ".join(part.strip() for part in parts if part.strip())
    if thought and thought != drop_thoughts(text):
        yield from _wrapped(f"({who}, aside: {thought})", "        ")


def _direction(text: str) -> str:
    return "\n".join(_wrapped(f"[{text}]", "  "))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent) or [indent]


def _acts(scenes: Sequence[dict[str, Any]]) -> str:
    number = sum(scene["scene"] == "night" for scene in scenes)
    return f"{number} act{'s' * (number != 1)}"


def _roman(number: int) -> str:
    """
    >>> _roman(3), _roman(14)
    ('III', 'XIV')
    """
    for value, letters in ROMAN.items():
        if number >= value:
            return letters + _roman(number - value)
    return ""


def _name(seat: int | None) -> str:
    return "nobody" if seat is None else f"Player {seat}"


async def main() -> None:
    parser = argparse.ArgumentParser(description="Finished games of werewolf as plays.")
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("rollout", nargs="?", help="print this one (default: write the last three games to RUN/plays)")
    parser.add_argument("--thoughts", action="store_true", help="with what the players thought but did not say")
    arguments = parser.parse_args()
    store = await open_run(arguments.run)
    try:
        if arguments.rollout:
            chosen = [await store.get(arguments.rollout)]
        else:
            chosen = await store.list(limit=FEW, newest=True)
        for rollout in chosen:
            turns, events = await store.turns(rollout.id), await store.events(rollout.id)
            text = escape_text(write_play(rollout, turns, events, arguments.thoughts))
            if arguments.rollout:
                print(text, end="")
                continue
            file = Path(arguments.run) / "plays" / f"{rollout.id}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            print(file)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
