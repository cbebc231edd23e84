"""AG2 (the other AutoGen)."""

import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from verdict import QUESTION, Verdict, show, typed


async def main() -> None:
    config = OpenAIConfig(model=MODEL, streaming=STREAM)
    agent = Agent("cities", SYSTEM, config=config, tools=[lookup, add])
    reply = None
    for question in QUESTIONS:
        reply = await (agent.ask(question) if reply is None else reply.ask(question))
        say(reply.body)
    with typed():
        show(await (await Agent("judge", config=config, response_schema=Verdict).ask(QUESTION)).content())


asyncio.run(main())
