"""Pydantic AI; with `--responses` through the responses API, with `--anthropic` through Anthropic's, with `--demanded`
with an answer that is an object, which it demands as a tool call. `--native` and `--prompted` are its other ways to
an answer of a type."""

import asyncio
import sys

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from verdict import QUESTION, Verdict, show, typed


class Answer(BaseModel):
    answer: str

    def __str__(self) -> str:
        return self.answer


async def follow(_, events) -> None:
    async for _event in events:
        pass


async def main() -> None:
    api = OpenAIResponsesModel if "--responses" in sys.argv else OpenAIChatModel
    api = AnthropicModel if "--anthropic" in sys.argv else api
    answer = ToolOutput(Answer, name="final_answer") if "--demanded" in sys.argv else str
    agent = Agent(api(MODEL), instructions=SYSTEM, tools=[lookup, add], output_type=answer)
    history = []
    for question in QUESTIONS:
        result = await agent.run(question, message_history=history, event_stream_handler=follow if STREAM else None)
        history = result.all_messages()
        say(result.output)
    if TYPED:
        kind = NativeOutput if "--native" in sys.argv else PromptedOutput if "--prompted" in sys.argv else ToolOutput
        with typed():
            show((await Agent(api(MODEL), output_type=kind(Verdict)).run(QUESTION)).output)


asyncio.run(main())
