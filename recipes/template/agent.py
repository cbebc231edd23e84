"""An agent to copy: a tool, what an answer is worth, and the agent around them. Put your own in their place.

task      {"messages": [{"role": "user", "content": "What is 37 * 52?"}], "answer": "1924"}
rewards   {"reward": 1.0, "call": 1.0}
"""

import strop


@strop.tool
def calculator(expression: str) -> str:
    """Compute one operation on two integers."""
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


def score(task: strop.Task, episode: strop.Episode) -> dict[str, float]:
    """`call`: the tool was called. `reward`: so it was, and the answer is right."""
    right = task.data["answer"] in episode.answer.replace(".", " ").split()
    return {"reward": float(right and bool(episode.calls)), "call": float(bool(episode.calls))}


agent = strop.ToolAgent(tools=[calculator], reward=score, max_turns=4)
