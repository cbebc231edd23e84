"""An agent to copy: a tool, some tasks, and what an answer is worth. Put your own in their place.

task      {"messages": [{"role": "user", "content": "What is 37 * 52?"}], "answer": "1924"}
rewards   {"reward": 1.0, "call": 1.0}
"""

import json
import random

import strop


@strop.tool
def calculator(expression: str) -> str:
    """Compute one operation on two integers."""
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


def tasks(examples: bool = False) -> list[strop.Task]:
    rng, found = random.Random(0), list[strop.Task]()
    for n in range(500):
        asked = f"{rng.randrange(10, 1000)} {rng.choice('+-*')} {rng.randrange(10, 1000)}"
        messages = [*(EXAMPLE if examples else ()), {"role": "user", "content": f"What is {asked}?"}]
        data = {"messages": messages, "answer": calculator(asked)}
        found.append(strop.Task(id=f"{n:03d}", split="train" if n % 10 else "test", data=data))
    return found


def score(task: strop.Task, episode: strop.Episode) -> dict[str, float]:
    right = task.data["answer"] in episode.answer.replace(".", " ").split()
    return {"reward": float(right and bool(episode.calls)), "call": float(bool(episode.calls))}


agent = strop.ToolAgent(tools=[calculator], reward=score, max_turns=4)

CALL = {"name": "calculator", "arguments": json.dumps({"expression": "12 + 30"})}
EXAMPLE = [
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "1", "content": "42"},
    {"role": "assistant", "content": "12 + 30 is 42."},
]
