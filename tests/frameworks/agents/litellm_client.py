"""LiteLLM as a library: chat completions, or with `--anthropic` messages."""

import json
import os
import sys

import litellm
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from verdict import QUESTION, Verdict, show, typed

TOOLS = {"lookup": lookup, "add": add}
where = {"model": f"openai/{MODEL}"}
if "--anthropic" in sys.argv:
    where = {"model": f"anthropic/{MODEL}", "api_base": os.environ["ANTHROPIC_BASE_URL"]}


def describe(name: str, text: str, **parameters: str) -> dict:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


tools = [
    describe("lookup", "Look up how many people live in a city.", city="string"),
    describe("add", "Add two numbers.", a="integer", b="integer"),
]
messages: list = [{"role": "system", "content": SYSTEM}]
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        reply = litellm.completion(**where, messages=messages, tools=tools, stream=STREAM)
        if STREAM:
            reply = litellm.stream_chunk_builder([*reply])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = str(TOOLS[call.function.name](**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    say(message.content)
with typed():
    asked = [{"role": "user", "content": QUESTION}]
    show(litellm.completion(**where, messages=asked, response_format=Verdict).choices[0].message.content)
