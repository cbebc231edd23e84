"""A room-booking agent: a plain OpenAI client with one tool. Its two prompts are what is improved."""

from __future__ import annotations

import json
import re
from typing import Any

from rooms import list_rooms

from strop import LLM, Task

TOOL = {
    "type": "function",
    "function": {
        "name": "list_rooms",
        "description": "Every meeting room: capacity, equipment, accessibility, distance, and whether it is free then.",
        "parameters": {
            "type": "object",
            "properties": {
                "date": {"type": "string", "description": "YYYY-MM-DD"},
                "time": {"type": "string", "description": "HH:MM"},
                "duration_min": {"type": "integer", "description": "minutes"},
            },
            "required": ["date", "time", "duration_min"],
        },
    },
}


async def agent(task: Task, llm: LLM) -> dict[str, float]:
    wanted = task.data["wanted"]
    client = llm.async_client()
    messages: list[Any] = [
        {"role": "system", "content": llm.prompts["system"]},
        {
            "role": "user",
            "content": llm.prompt("request", **wanted | {"needs": ", ".join(wanted["needs"]) or "nothing"}),
        },
    ]
    said = ""
    for _ in range(3):
        answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        said = message.content or ""
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.arguments)}
            for call in message.tool_calls
        ]
    await client.close()
    return {"reward": float(read_choice(said) == task.data["expected"]), "answered": float(bool(read_choice(said)))}


def run_tool(arguments: str) -> str:
    try:
        return json.dumps(list_rooms(**json.loads(arguments)))
    except (ValueError, TypeError) as error:
        return f"error: {error}"  # the model reads it


def read_choice(said: str) -> str:
    """
    >>> read_choice("final_choice: Nova\\nreason: it is free")
    'Nova'
    """
    found = re.findall(r"final_choice:\s*\**([A-Za-z ]+?)\**\s*(?:\n|$)", said)
    return found[-1].strip() if found else ""
