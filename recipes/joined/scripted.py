"""A stand-in for the optimiser model, which costs money: an OpenAI-compatible server that answers with a way to ask,
drawn blindly from PHRASINGS. What a way of asking is worth, the model that is trained says.

    python recipes/joined/scripted.py [--port N]     prints its address
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import strop.testing

PHRASINGS = (
    "What is {symbols}?", "{symbols} = ?", "Compute {symbols}.", "Please work out {symbols}.",
    "Use the calculator: {symbols}.", "With the calculator, how much is {symbols}?", "Guess {symbols}.",
    "calculator {symbols}", "Do not guess: {symbols}.", "{symbols}", "How much is {symbols}?",
)  # fmt: skip


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--port", type=int, default=0)
    asked = itertools.count()

    def answer(request: dict[str, Any]) -> str:
        return f"```\n{random.Random(request.get('seed', next(asked))).choice(PHRASINGS)}\n```"

    strop.testing.serve_chat(answer, port=given.parse_args().port)


if __name__ == "__main__":
    main()
