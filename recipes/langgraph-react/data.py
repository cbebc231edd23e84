"""Questions for a calculator.

tasks("made")             the demo's, one operation each; nothing is downloaded
tasks("openai/gsm8k")     GSM8K by its name on the Hugging Face hub
tasks("gsm8k/")           a folder with its train.jsonl and test.jsonl, or a file with question and answer (#### 18)
"""

import json
from typing import Any

from strop import Task, demo
from strop.errors import TaskError
from strop.rewards import after_hashes
from strop.tasks.load import load

EXAMPLES = [
    ("What is 12 + 5?", "12 + 5", "17"),
    ("How much is 40 minus 8?", "40 - 8", "32"),
    ("Compute 6 * 30.", "6 * 30", "180"),
]
"""How it goes, for models that hardly call a tool of their own accord: question, call, result."""


def tasks(data: str = "made", examples: bool = False) -> list[Task]:
    """Tasks `{"messages": [...], "answer": "1924"}`; made ones also have the `calls` that they need. With `examples`,
    every conversation begins with some that went well."""
    if data == "made":
        found = demo.tasks("calc")
    else:
        try:
            found = load(data, **({"name": "main"} if data == "openai/gsm8k" else {}))
        except TaskError as error:
            raise TaskError(f"{error}; a copy of it elsewhere is given with --data PATH") from error
    before = [message for one in EXAMPLES if examples for message in example(*one)]
    return [Task(id=task.id, split=task.split, data=read(task, before)) for task in found]


def example(question: str, expression: str, result: str) -> list[dict[str, Any]]:
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": result, "type": "function", "function": call}]},
        {"role": "tool", "content": result, "tool_call_id": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


def read(task: Task, before: list[dict[str, Any]]) -> dict[str, Any]:
    """
    >>> read(Task(id="t", data={"question": "9 * 2?", "answer": "9 * 2 = <<9*2=18>>18\\n#### 18"}), [])
    {'messages': [{'role': 'user', 'content': '9 * 2?'}], 'answer': '18'}
    """
    match task.data:
        case {"question": question, "calls": calls, "answer": answer}:
            more: dict[str, Any] = {"answer": str(answer), "calls": calls}
        case {"question": question, "answer": str(solution)} if answer := after_hashes(solution):
            more = {"answer": answer.replace(",", "")}
        case _:
            raise TaskError(
                f"{task.id} is not a word problem. Fix: give rows like GSM8K's, with question and answer (the number "
                "after ####)"
            )
    return {"messages": [*before, {"role": "user", "content": question}], **more}
