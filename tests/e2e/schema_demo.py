"""The demo's agent with a grammar in every turn: calls must follow the tool's schema and, where the first answer has to
be one, it is. Tasks, prompts and rewards are the demo's."""

import json
from typing import Any

from strop.demo import MAX_TURNS, TOOLS, calculator, score
from strop.types import Task

FUNCTION = TOOLS[0]["function"] | {"strict": True}
FUNCTION["parameters"] = FUNCTION["parameters"] | {"additionalProperties": False}
STRICT: Any = [{"type": "function", "function": FUNCTION}]


def agent(task: Task, llm: Any) -> dict[str, float]:
    return solve(task, llm, "auto")


def forced(task: Task, llm: Any) -> dict[str, float]:
    return solve(task, llm, "required")


def solve(task: Task, llm: Any, first: str) -> dict[str, float]:
    client = llm.client()
    messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
    expressions: list[str] = []
    for turn in range(MAX_TURNS):
        choice: Any = "auto" if turn else first
        done = client.chat.completions.create(model=llm.model, messages=messages, tools=STRICT, tool_choice=choice)
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            assert turn or first == "auto" or done.choices[0].finish_reason == "length", "it has to call"
            return score(task.data, expressions, message.content)
        for call in message.tool_calls:
            expression = json.loads(call.function.arguments)["expression"]
            expressions.append(expression)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(expression)})
    return score(task.data, expressions, None)
