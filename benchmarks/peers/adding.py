"""A task of two turns, for a whole training run beside TRL's: ask a tool for a sum, then say it.

    question   What is 37 + 85?
    model      <tool_call>{"name": "add", "arguments": {"a": 37, "b": 85}}</tool_call>
    tool       122
    model      122
    reward     1 for exactly this call and this number, 0.6 for the call alone, 0.2 for any call that can be read

SmolLM2-135M hardly ever makes a call of its own accord, so an example stands in the system prompt and once more as an
exchange before the question. `agent` is what Strop trains, a plain OpenAI client; peers/trl_side.py gives the same
messages, questions and rewards to TRL.

The file needs nothing but the standard library until a model is made.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

TEMPLATE = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
{% endif -%}
{%- for tool in tools or [] if tool.function.name != 'add' %}{{ tool | tojson }}
{% endfor -%}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{% set f = call.function or call %}
{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""SmolLM2's own, and beside it calls and results. Tools are described but for `add`, which the prompt shows: a template
that leaves tools out would have the gateway write them into the prompt, and then the model hardly ever makes a call."""

CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 5}}</tool_call>'
EXAMPLE = {"id": "example", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 5}'}}
BEFORE: list[dict[str, Any]] = [
    {
        "role": "system",
        "content": f"Reply with one tool call only, like this example.\nWhat is 12 + 5?\n{CALL}",
    },
    {"role": "user", "content": "What is 12 + 5?"},
    {"role": "assistant", "content": None, "tool_calls": [EXAMPLE]},
    {"role": "tool", "content": "17", "tool_call_id": "example"},
    {"role": "assistant", "content": "17"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions, and the numbers in them."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "a": a, "b": b} for a, b in pairs]


def tasks(count: int, seed: int = 0) -> list[Any]:
    from strop.types import Task

    return [Task(id=f"sum-{n}", data=data) for n, data in enumerate(sums(count, seed))]


def agent(task: Any, llm: Any) -> float:
    client, data = llm.client(), task.data
    messages: list[Any] = [*BEFORE, {"role": "user", "content": data["question"]}]

    def ask() -> Any:
        return client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS).choices[0].message

    said = ask()
    if not said.tool_calls:
        return 0.0
    messages.append(said.model_dump(exclude_none=True))
    calls = [read(call.function.name, call.function.arguments) for call in said.tool_calls]
    for call, given in zip(said.tool_calls, calls, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": add(given)})
    return reward(calls, ask().content or "", data["a"], data["b"])


def read(name: str, arguments: str) -> dict[str, Any]:
    try:
        return {"name": name, "arguments": json.loads(arguments)}
    except ValueError:
        return {"name": name, "arguments": None}


def add(call: dict[str, Any]) -> str:
    try:
        return str(int(call["arguments"]["a"]) + int(call["arguments"]["b"]))
    except (KeyError, TypeError, ValueError):
        return "error: give two integers, a and b"


def reward(calls: list[dict[str, Any]], answer: str, a: int, b: int) -> float:
    """
    >>> call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    >>> reward([call], "3", 1, 2), reward([call], "4", 1, 2), reward([call, call], "3", 1, 2), reward([], "3", 1, 2)
    (1.0, 0.6, 0.2, 0.0)
    """
    if not calls:
        return 0.0
    if calls != [{"name": "add", "arguments": {"a": a, "b": b}}] or not all(
        type(value) is int for value in calls[0]["arguments"].values()
    ):
        return 0.2
    return 1.0 if re.findall(r"\d+", answer) == [str(a + b)] else 0.6


def model(folder: Path) -> Path:
    """SmolLM2-135M with the template above, in `folder`."""
    from strop.models.names import resolve

    source = resolve("smollm2-135m")
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "chat_template.jinja" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
