"""What all agents of this folder have in common: two tools, what they are told, and what they are asked.

An agent is a program as one writes it with its framework. It finds its model in the environment (OPENAI_BASE_URL,
OPENAI_API_KEY, STROP_MODEL), asks every question in one conversation and prints each answer; `--stream` has the model's
answers streamed, and `--typed` asks the question of verdict.py at the end, as well as the framework can.
"""

import os
import sys

MODEL = os.environ["STROP_MODEL"]
STREAM = "--stream" in sys.argv
TYPED = "--typed" in sys.argv

SYSTEM = "You answer questions about cities. Look things up and calculate with the tools, never from memory."
QUESTIONS = ("How many people live in Rome and Oslo together?", "Which of the two is bigger?")

PEOPLE = {"Rome": 2748109, "Oslo": 709037}


def lookup(city: str) -> int:
    """Look up how many people live in a city.

    Args:
        city: The name of the city.
    """
    return PEOPLE[city]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def say(answer: object) -> None:
    print("answer:", answer, flush=True)
