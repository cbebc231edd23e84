"""An agent whose every answer must follow a schema, asked for through one model API or another."""

import json
from typing import Any

import anthropic
import openai

from strop.types import Task

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 200}, "sure": {"enum": ["yes", "no"]}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}


def tasks() -> list[Task]:
    kinds = ["chat", "guided", "responses", "messages"]
    return [Task(id=f"{kind}-{n}", data={"api": kind, "a": n}) for n in range(4) for kind in kinds]


def ask(llm: Any, api: str, question: str) -> str | None:
    """What it said, unless that was cut off."""
    messages: Any = [{"role": "user", "content": question}]
    if api == "messages":
        client = anthropic.Anthropic(base_url=llm.base_url.removesuffix("/v1"), api_key=llm.api_key)
        form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        said = client.messages.create(model=llm.model, max_tokens=200, messages=messages, output_config=form)
        return said.content[0].text if said.stop_reason == "end_turn" else None  # pyright: ignore
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    if api == "responses":
        text: Any = {"format": {"type": "json_schema", "name": "sum", "strict": True, "schema": SCHEMA}}
        answer = client.responses.create(model=llm.model, input=question, text=text)
        assert answer.to_dict()["text"]["format"]["name"] == "sum", answer.text  # pyright: ignore
        return answer.output_text if answer.status == "completed" else None
    named: Any = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}}
    how: Any = {"extra_body": {"guided_json": SCHEMA}} if api == "guided" else {"response_format": named}
    choice = client.chat.completions.create(model=llm.model, messages=messages, **how).choices[0]
    return choice.message.content if choice.finish_reason == "stop" else None


def agent(task: Task, llm: Any) -> float:
    said = ask(llm, task.data["api"], f"What is {task.data['a']} + 5?")
    if said is None:
        return 0.0
    found = json.loads(said)
    assert set(found) == {"sum", "sure"}, said
    assert 0 <= found["sum"] <= 200, said
    assert found["sure"] in ("yes", "no"), said
    return found["sum"] / 200
