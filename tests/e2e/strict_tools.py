"""An agent with strict tools in every turn, through one model API or another. Calls that are demanded are made."""

import json
from typing import Any

import anthropic
import openai
from jsonschema import Draft202012Validator

from strop.types import Task

ADD: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["one", "ten"]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
}
ANSWER: Any = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
KINDS = ("auto", "required", "named", "schema")


def tasks() -> list[Task]:
    apis = ("chat", "responses", "messages")
    return [Task(id=f"{api}-{kind}", data={"api": api, "kind": kind}) for api in apis for kind in KINDS]


def ask_chat(llm: Any, kind: str, messages: Any) -> tuple[list[Any], str | None]:
    choice: Any = {"required": "required", "named": {"type": "function", "function": {"name": "add"}}}.get(kind, "auto")
    form: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}}
    said = (
        openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        .chat.completions.create(
            model=llm.model,
            messages=messages,
            tool_choice=choice,
            parallel_tool_calls=kind != "named",
            tools=[{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}],
            **(form if kind == "schema" else {}),
        )
        .choices[0]
    )
    calls: Any = said.message.tool_calls or ()
    cut = said.finish_reason == "length"
    return [json.loads(call.function.arguments) for call in calls], None if cut else said.message.content or ""


def ask_responses(llm: Any, kind: str, messages: Any) -> tuple[list[Any], str | None]:
    choice: Any = {"required": "required", "named": {"type": "function", "name": "add"}}.get(kind, "auto")
    form: Any = {"text": {"format": {"type": "json_schema", "name": "x", "schema": ANSWER}}} if kind == "schema" else {}
    said: Any = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key).responses.create(
        model=llm.model,
        input=messages,
        tool_choice=choice,
        parallel_tool_calls=kind != "named",
        tools=[{"type": "function", "name": "add", "parameters": ADD, "strict": True}],
        **form,
    )
    calls = [json.loads(item.arguments) for item in said.output if item.type == "function_call"]
    return calls, said.output_text if said.status == "completed" else None


def ask_messages(llm: Any, kind: str, messages: Any) -> tuple[list[Any], str | None]:
    client: Any = anthropic.Anthropic(base_url=llm.base_url.removesuffix("/v1"), api_key=llm.api_key)
    choice: Any = {
        "required": {"type": "any"},
        "named": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    }
    form: Any = {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}} if kind == "schema" else {}
    said = client.messages.create(
        model=llm.model,
        max_tokens=120,
        messages=messages,
        tool_choice=choice.get(kind, {"type": "auto"}),
        tools=[{"name": "add", "input_schema": ADD, "strict": True}],
        **form,
    )
    calls = [block.input for block in said.content if block.type == "tool_use"]
    text = "".join(block.text for block in said.content if block.type == "text")
    return calls, text if said.stop_reason != "max_tokens" else None


ASK = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages}


def agent(task: Task, llm: Any) -> float:
    kind = task.data["kind"]
    calls, text = ASK[task.data["api"]](llm, kind, [{"role": "user", "content": "What is 12 + 5?"}])
    for arguments in calls:
        Draft202012Validator(ADD).validate(arguments)
    if text is None:
        return 0.0
    if kind == "schema" and not calls:
        Draft202012Validator(ANSWER).validate(json.loads(text))
    if kind in ("required", "named"):
        assert calls, "a call that is demanded is made"
        assert not text
        assert len(calls) == 1 or kind == "required"
    return calls[0]["a"] / 99 if calls else 0.0
