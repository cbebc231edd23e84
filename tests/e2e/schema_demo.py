"""The demo's agent with a grammar in every turn: its first answer must be a call, every call must follow the tool's
schema. Tasks, prompts and rewards are the demo's."""

import json
from typing import Any

from strop.demo import MAX_TURNS, TOOLS, calculator, score
from strop.types import Task

FUNCTION = TOOLS[0]["function"] | {"strict": True}
FUNCTION["parameters"] = FUNCTION["parameters"] | {"additionalProperties": False}
STRICT: Any = [{"type": "function", "function": FUNCTION}]


def agent(task: Task, llm: Any) -> dict[str, float]:
    client = llm.client()
    messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
    expressions: list[str] = []
    for turn in range(MAX_TURNS):
        choice: Any = "auto" if turn else "required"
        done = client.chat.completions.create(model=llm.model, messages=messages, tools=STRICT, tool_choice=choice)
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            assert turn or done.choices[0].finish_reason == "length", "the first answer is a call, unless it is cut off"
            return score(task.data, expressions, message.content)
        for call in message.tool_calls:
            expression = json.loads(call.function.arguments)["expression"]
            expressions.append(expression)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(expression)})
    return score(task.data, expressions, None)
