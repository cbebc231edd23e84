"""The demo's agent, with the words of its question as a prompt: `llm.prompt("request", ...)`."""

from __future__ import annotations

from typing import Any

from strop import LLM, Task, demo


def agent(task: Task, llm: LLM) -> dict[str, float]:
    client = llm.client()
    data = task.data
    messages: list[Any] = [{"role": "user", "content": llm.prompt("request", symbols=data["symbols"])}]
    expressions: list[str] = []
    answer = None
    for _ in range(demo.MAX_TURNS):
        message = (
            client.chat.completions.create(model=llm.model, messages=messages, tools=demo.TOOLS).choices[0].message
        )
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            answer = message.content
            break
        for call in message.tool_calls:
            expression, result = demo.run_tool(call.function.name, call.function.arguments)
            expressions.append(expression)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return demo.score(data, expressions, answer)
