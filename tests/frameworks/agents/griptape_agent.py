"""Griptape: an agent with a tool of two activities."""

import cities
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, say
from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.rules import Rule
from griptape.structures import Agent
from griptape.tokenizers import SimpleTokenizer
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Schema
from verdict import QUESTION, Verdict, show, typed


class Cities(BaseTool):
    @activity({"description": "Look up how many people live in a city.", "schema": Schema({"city": str})})
    def lookup(self, city: str) -> TextArtifact:
        return TextArtifact(str(cities.lookup(city)))

    @activity({"description": "Add two numbers.", "schema": Schema({"a": int, "b": int})})
    def add(self, a: int, b: int) -> TextArtifact:
        return TextArtifact(str(cities.add(a, b)))


driver = OpenAiChatPromptDriver(
    model=MODEL,
    stream=STREAM,
    tokenizer=SimpleTokenizer(characters_per_token=4, max_input_tokens=30_000, max_output_tokens=1000),
)  # its own would be fetched
agent = Agent(prompt_driver=driver, tools=[Cities()], rules=[Rule(SYSTEM)])
for question in QUESTIONS:
    say(agent.run(question).output.value)
with typed():
    show(Agent(prompt_driver=driver, output_schema=Verdict).run(QUESTION).output.value)
