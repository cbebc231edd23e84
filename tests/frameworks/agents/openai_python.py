"""OpenAI's Python client by hand: `--responses` for that API, `--async` for the asynchronous client's stream helper."""

import asyncio
import inspect
import json
import sys

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from openai import AsyncOpenAI, OpenAI
from verdict import QUESTION, Verdict, show, typed

TOOLS = {"lookup": lookup, "add": add}
KINDS = {str: "string", int: "integer"}


def describe(tool) -> dict:
    properties = {name: {"type": KINDS[p.annotation]} for name, p in inspect.signature(tool).parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": tool.__name__, "description": tool.__doc__.splitlines()[0], "parameters": parameters}


def call(name: str, arguments: str) -> str:
    return str(TOOLS[name](**json.loads(arguments)))


def chat(client: OpenAI) -> None:
    tools = [{"type": "function", "function": describe(tool)} for tool in TOOLS.values()]
    messages: list = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            given = {"model": MODEL, "messages": messages, "tools": tools}
            if STREAM:
                with client.chat.completions.stream(**given) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**given).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for one in message.tool_calls:
                result = call(one.function.name, one.function.arguments)
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        say(message.content)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "response_format": Verdict}
    with typed():
        if STREAM:
            with client.chat.completions.stream(**asked) as stream:
                show(stream.get_final_completion().choices[0].message.parsed)
        else:
            show(client.chat.completions.parse(**asked).choices[0].message.parsed)


def responses(client: OpenAI) -> None:
    tools = [{"type": "function", **describe(tool)} for tool in TOOLS.values()]
    items: list = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            given = {"model": MODEL, "instructions": SYSTEM, "input": items, "tools": tools}
            if STREAM:
                with client.responses.stream(**given) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(**given)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for one in calls:
                output = call(one.name, one.arguments)
                items.append({"type": "function_call_output", "call_id": one.call_id, "output": output})
        say(response.output_text)
    with typed():
        if STREAM:
            with client.responses.stream(model=MODEL, input=QUESTION, text_format=Verdict) as stream:
                show(stream.get_final_response().output_parsed)
        else:
            show(client.responses.parse(model=MODEL, input=QUESTION, text_format=Verdict).output_parsed)


async def converse(client: AsyncOpenAI) -> None:
    """The responses API's own memory: every request names the one before it."""
    tools = [{"type": "function", **describe(tool)} for tool in TOOLS.values()]
    last = None
    for question in QUESTIONS:
        items: list = [{"role": "user", "content": question}]
        while items:
            response = await client.responses.create(
                model=MODEL, instructions=SYSTEM, input=items, tools=tools, previous_response_id=last
            )
            last = response.id
            items = [
                {"type": "function_call_output", "call_id": item.call_id, "output": call(item.name, item.arguments)}
                for item in response.output
                if item.type == "function_call"
            ]
        say(response.output_text)
    with typed():
        show((await client.responses.parse(model=MODEL, input=QUESTION, text_format=Verdict)).output_parsed)


if "--async" in sys.argv:
    asyncio.run(converse(AsyncOpenAI()))
else:
    (responses if "--responses" in sys.argv else chat)(OpenAI())
