"""smolagents: an agent that must call a tool in every turn, also to give its answer; with `--code` one that writes
Python, in which the tools are functions."""

import os
import sys

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from smolagents import ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from verdict import QUESTION, SCHEMA, show, typed

model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if "--code" in sys.argv else ToolCallingAgent
agent = kind([tool(lookup), tool(add)], model, instructions=SYSTEM, stream_outputs=STREAM)
for number, question in enumerate(QUESTIONS):
    say(agent.run(question, reset=number == 0))
if TYPED:
    with typed():
        form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
        show(model.generate([ChatMessage(role="user", content=QUESTION)], response_format=form).content)
