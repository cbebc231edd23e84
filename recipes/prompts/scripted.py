"""Stand-ins for two models that cost money, so that the recipe runs whole on a laptop. Their figures say nothing about
a real model.

    python recipes/prompts/scripted.py [--port N]     one OpenAI-compatible server for both; prints its address

`booker` calls the tool, then chooses a room by those rules that its system prompt names, and by no others. `writer`
rewrites the system prompt that it is shown: it adds a sentence of SENTENCES, drawn blindly, of which half say nothing
that matters; the request it leaves as it is, but for a blank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from typing import Any

from rooms import choose

import strop.testing

SENTENCES = {
    "free": "Only a room that is free for the whole slot will do.",
    "seats": "Its capacity must hold all attendees.",
    "equipment": "It must have all the equipment that is needed.",
    "accessible": "It must be accessible where that is required.",
    "none": "Answer No Room if none fits.",
    "slack": "Of several, take the one with the fewest empty seats.",
    "extra": "Then the one with the least equipment that nobody needs.",
    "distance": "Then the nearest one.",
    "bookings": "Then the one with the fewest bookings.",
}
IDLE = (
    "Be polite.", "Think step by step.", "Meetings are important.", "Write in English.", "Do your best.",
    "Rooms have names of stars.", "Never apologise.", "You are an expert.", "Keep it short.",
)  # fmt: skip


def book(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What the agent's model says."""
    system, asked = messages[0]["content"], messages[1]["content"]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    found = re.search(r"(\d{4}-\d\d-\d\d).*?(\d\d:\d\d).*?(\d+) minutes", asked, re.DOTALL)
    if found is None:
        return {"role": "assistant", "content": "When is it?"}
    if not results:
        arguments = {"date": found[1], "time": found[2], "duration_min": int(found[3])}
        call = {"name": "list_rooms", "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        }
    needs = re.search(r"Needs: ([^.]*)\.", asked)
    people = re.search(r"(\d+) attendees", asked)
    wanted = {
        "needs": [] if needs is None or needs[1] == "nothing" else needs[1].split(", "),
        "attendees": int(people[1]) if people else 1,
        "accessible_required": "required: True" in asked,
    }
    rules = [name for name, sentence in SENTENCES.items() if sentence in system]
    return {"role": "assistant", "content": f"final_choice: {choose(wanted, json.loads(results[-1]), rules)}"}


def write(question: str, draw: random.Random) -> str:
    """What the optimiser model says."""
    if "Do not write a new prompt" in question:
        return "It leaves out what a good room is."
    found = re.search(r"<prompt>\n(.*?)\n</prompt>", question, re.DOTALL) or re.search(
        r"```\n(.*?)\n```", question, re.DOTALL
    )
    before = found[1] if found else ""
    if "{date}" in before:
        return f"```\n{before} \n```"
    new = [one for one in (*SENTENCES.values(), *IDLE) if one not in before]
    return "\n".join(["```", before, *draw.sample(new, min(2, len(new))), "```"])


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--port", type=int, default=0)
    asked = itertools.count()

    def answer(request: dict[str, Any]) -> str | dict[str, Any]:
        messages = request["messages"]
        if request["model"] == "booker":
            return book(messages)
        return write(messages[-1]["content"], random.Random(f"{request.get('seed', next(asked))} {messages}"))

    strop.testing.serve_chat(answer, port=given.parse_args().port)


if __name__ == "__main__":
    main()
