"""Microsoft Agent Framework: an agent over chat completions, or with `--responses` over the responses API."""

import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from verdict import QUESTION, Verdict, show, typed


async def main() -> None:
    client = (OpenAIChatClient if "--responses" in sys.argv else OpenAIChatCompletionClient)(model=MODEL)
    agent = Agent(client=client, instructions=SYSTEM, tools=[lookup, add])
    session = agent.create_session()
    for question in QUESTIONS:
        if STREAM:
            stream = agent.run(question, session=session, stream=True)
            async for _ in stream:
                pass
            say((await stream.get_final_response()).text)
        else:
            say((await agent.run(question, session=session)).text)
    with typed():
        show((await Agent(client=client).run(QUESTION, options={"response_format": Verdict})).value)


asyncio.run(main())
