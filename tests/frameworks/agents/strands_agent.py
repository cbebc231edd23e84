"""Strands: an agent with OpenAI's model."""

import os

from cities import MODEL, QUESTIONS, SYSTEM, add, lookup, say
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from verdict import QUESTION, Verdict, show, typed

where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIModel(client_args=where, model_id=MODEL)
agent = Agent(model=model, tools=[tool(lookup), tool(add)], system_prompt=SYSTEM, callback_handler=None)
for question in QUESTIONS:
    say(str(agent(question)).strip())
with typed():
    show(Agent(model=model, callback_handler=None)(QUESTION, structured_output_model=Verdict).structured_output)
