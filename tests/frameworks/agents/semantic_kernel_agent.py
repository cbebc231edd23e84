"""Semantic Kernel: a chat-completion agent with a plugin."""

import asyncio

import cities
from cities import MODEL, QUESTIONS, SYSTEM, say
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function
from verdict import QUESTION, Verdict, show, typed


class Cities:
    @kernel_function(name="lookup", description="Look up how many people live in a city.")
    def lookup(self, city: str) -> int:
        return cities.lookup(city)

    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: int, b: int) -> int:
        return cities.add(a, b)


async def main() -> None:
    service = OpenAIChatCompletion(ai_model_id=MODEL)
    agent = ChatCompletionAgent(service=service, name="cities", instructions=SYSTEM, plugins=[Cities()])
    thread = None
    for question in QUESTIONS:
        reply = await agent.get_response(messages=question, thread=thread)
        thread = reply.thread
        say(reply.message)
    with typed():
        settings = OpenAIChatPromptExecutionSettings(response_format=Verdict)
        judge = ChatCompletionAgent(service=service, name="judge", arguments=KernelArguments(settings=settings))
        show(str((await judge.get_response(messages=QUESTION)).message))


asyncio.run(main())
