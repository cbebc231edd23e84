"""Tasks to copy; a file will do as well (`tasks = "tasks.jsonl"`), lines of {"question": ..., "answer": ...}."""

import json
import operator
import random
from typing import Any

import strop

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def tasks(examples: bool = False) -> list[strop.Task]:
    """500 questions, of which every tenth is held out. With `examples`, each has conversations before it that went
    well, for models that hardly call a tool of their own accord."""
    rng = random.Random(0)
    before = [message for one in ((12, "+", 30), (71, "-", 8), (6, "*", 15)) if examples for message in example(*one)]
    found: list[strop.Task] = []
    for n in range(500):
        a, sign, b = rng.randrange(10, 1000), rng.choice("+-*"), rng.randrange(10, 1000)
        messages = [*before, {"role": "user", "content": f"What is {a} {sign} {b}?"}]
        data = {"messages": messages, "answer": str(OPERATIONS[sign](a, b))}
        found.append(strop.Task(id=f"{n:03d}", split="train" if n % 10 else "test", data=data))
    return found


def example(a: int, sign: str, b: int) -> list[dict[str, Any]]:
    asked, result = f"{a} {sign} {b}", str(OPERATIONS[sign](a, b))
    call = {"name": "calculator", "arguments": json.dumps({"expression": asked})}
    return [
        {"role": "user", "content": f"What is {asked}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": result, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": result, "content": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]
