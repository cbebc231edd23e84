"""Pydantic AI; with `--responses` through the responses API, with `--typed` with an answer that is an object, which it
demands as a tool call."""

import asyncio
import sys

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Answer(BaseModel):
    answer: str

    def __str__(self) -> str:
        return self.answer


async def follow(_, events) -> None:
    async for _event in events:
        pass


async def main() -> None:
    api = OpenAIResponsesModel if "--responses" in sys.argv else OpenAIChatModel
    answer = ToolOutput(Answer, name="final_answer") if "--typed" in sys.argv else str
    agent = Agent(api(MODEL), instructions=SYSTEM, tools=[lookup, add], output_type=answer)
    history = []
    for question in QUESTIONS:
        result = await agent.run(question, message_history=history, event_stream_handler=follow if STREAM else None)
        history = result.all_messages()
        say(result.output)


asyncio.run(main())
