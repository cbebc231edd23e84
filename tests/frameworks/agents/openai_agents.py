"""OpenAI Agents: with a model of chat completions or, with `--responses`, of the responses API. With `--default`
none is given, and the framework takes a model and settings of its own choice; `--chat` then chooses only the API."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_default_openai_api,
)
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from openai import AsyncOpenAI
from verdict import QUESTION, Verdict, show, typed


async def main() -> None:
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI())
    if "--responses" in sys.argv:
        model = OpenAIResponsesModel(MODEL, AsyncOpenAI())
    if "--default" in sys.argv:
        model = None
    if "--chat" in sys.argv:
        set_default_openai_api("chat_completions")
    agent = Agent(
        name="Cities",
        instructions=SYSTEM,
        model=model,
        tools=[function_tool(lookup), function_tool(add)],
    )
    history = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        if STREAM:
            result = Runner.run_streamed(agent, history)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history)
        history = result.to_input_list()
        say(result.final_output)
    if TYPED:
        with typed():
            result = await Runner.run(Agent(name="Judge", model=model, output_type=Verdict), QUESTION)
            show(result.final_output)


asyncio.run(main())
