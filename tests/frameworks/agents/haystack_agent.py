"""Haystack's agent, with its generator for OpenAI's chat completions."""

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.generators.utils import print_streaming_chunk
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from verdict import QUESTION, Verdict, show, typed

agent = Agent(
    chat_generator=OpenAIChatGenerator(model=MODEL),
    tools=[create_tool_from_function(tool) for tool in (lookup, add)],
    system_prompt=SYSTEM,
    streaming_callback=print_streaming_chunk if STREAM else None,
)
history: list[ChatMessage] = []
for question in QUESTIONS:
    result = agent.run(messages=[*history, ChatMessage.from_user(question)])
    history = [message for message in result["messages"] if not message.is_from("system")]
    say(result["last_message"].text)
with typed():
    generator = OpenAIChatGenerator(model=MODEL, generation_kwargs={"response_format": Verdict})
    show(generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text)
