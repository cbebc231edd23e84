"""The demo with an answer that follows a schema in place of a tool call: what is to be computed, in the form in which
the model in the box knows it. The prompt is the one that the demo's tools are rendered to, and the agent runs the
calculator; what earns a reward is the demo's.

The schema says what an expression looks like: the token with which this model ends a call, a quote and two brackets
and what comes after them, is not one that may come here, and it knows of no other.
"""

import json
from typing import Any

from strop.demo import TOOLS, calculator, score
from strop.types import Task

NAME, ABOUT = TOOLS[0]["function"]["name"], TOOLS[0]["function"]["description"]
EXPRESSION = {"type": "string", "pattern": "^[0-9]{2,3} [-+*] [0-9]{2,3}$"}


def make_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties, "additionalProperties": False}


SCHEMA = make_object({"name": {"const": NAME}, "arguments": make_object({"expression": EXPRESSION})})
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "call", "strict": True, "schema": SCHEMA}}
SYSTEM = f"<tools>\n{NAME}(expression): {ABOUT}\n</tools>"


def agent(task: Task, llm: Any) -> dict[str, float]:
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.data["question"]}]
    done = llm.client().chat.completions.create(model=llm.model, messages=messages, response_format=FORMAT)
    if done.choices[0].finish_reason != "stop":
        return score(task.data, [], None)
    expression = json.loads(done.choices[0].message.content)["arguments"]["expression"]
    return score(task.data, [expression], calculator(expression))
