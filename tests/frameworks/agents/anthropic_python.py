"""Anthropic's Python client: messages by hand, with `--stream` streamed; with `--runner` its runner of tools."""

import inspect
import sys

from anthropic import Anthropic, beta_tool
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from verdict import QUESTION, Verdict, show, typed

client = Anthropic()
TOOLS = {"lookup": lookup, "add": add}
KINDS = {str: "string", int: "integer"}


def describe(tool) -> dict:
    properties = {name: {"type": KINDS[p.annotation]} for name, p in inspect.signature(tool).parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": tool.__name__, "description": tool.__doc__.splitlines()[0], "input_schema": schema}


def ask(messages: list):
    given = {"model": MODEL, "max_tokens": 1000, "system": SYSTEM, "messages": messages}
    tools = [describe(tool) for tool in TOOLS.values()]
    if STREAM:
        with client.messages.stream(**given, tools=tools) as stream:
            return stream.get_final_message()
    return client.messages.create(**given, tools=tools)


def by_hand() -> None:
    messages: list = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (message := ask(messages)).stop_reason == "tool_use":
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(TOOLS[block.name](**block.input))}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        messages.append({"role": "assistant", "content": message.content})
        say(message.content[-1].text)


def with_runner() -> None:
    def text(tool):
        """Results are texts there."""

        def run(*args, **kwargs):
            return str(tool(*args, **kwargs))

        run.__name__, run.__doc__ = tool.__name__, tool.__doc__
        run.__signature__ = inspect.signature(tool).replace(return_annotation=str)
        run.__annotations__ = {**tool.__annotations__, "return": str}
        return run

    messages: list = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=1000,
            system=SYSTEM,
            messages=messages,
            tools=[beta_tool(text(tool)) for tool in TOOLS.values()],
        )
        for message in runner:
            messages.append({"role": "assistant", "content": message.content})
            if (results := runner.generate_tool_call_response()) is not None:
                messages.append(results)
        say(message.content[-1].text)


(with_runner if "--runner" in sys.argv else by_hand)()
asked = {"model": MODEL, "max_tokens": 1000, "messages": [{"role": "user", "content": QUESTION}]}
with typed():
    if STREAM:
        with client.messages.stream(**asked, output_format=Verdict) as stream:
            show(stream.get_final_message().parsed_output)
    else:
        show(client.messages.parse(**asked, output_format=Verdict).parsed_output)
