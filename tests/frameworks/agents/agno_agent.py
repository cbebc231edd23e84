"""Agno: an agent with a database for its history."""

import os
import sys

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from verdict import QUESTION, Verdict, show, typed


def make_model():
    if "--anthropic" in sys.argv:
        return Claude(id=MODEL)
    return (OpenAIResponses if "--responses" in sys.argv else OpenAIChat)(
        id=MODEL, base_url=os.environ["OPENAI_BASE_URL"]
    )


agent = Agent(
    model=make_model(),
    tools=[lookup, add],
    system_message=SYSTEM,
    db=InMemoryDb(),
    add_history_to_context=True,
    telemetry=False,
)
for question in QUESTIONS:
    if STREAM:
        say("".join(event.content or "" for event in agent.run(question, stream=True) if event.event == "RunContent"))
    else:
        say(agent.run(question).content)
with typed():
    show(Agent(model=make_model(), output_schema=Verdict, telemetry=False).run(QUESTION).content)
