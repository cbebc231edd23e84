"""BeeAI: its agent for tool calls."""

import asyncio

from beeai_framework.agents.tool_calling import ToolCallingAgent
from beeai_framework.backend import ChatModel, UserMessage
from beeai_framework.memory import UnconstrainedMemory
from beeai_framework.tools import tool
from cities import MODEL, QUESTIONS, add, lookup, say
from verdict import QUESTION, Verdict, show, typed


async def main() -> None:
    llm = ChatModel.from_name(f"openai:{MODEL}")
    agent = ToolCallingAgent(llm=llm, tools=[tool(lookup), tool(add)], memory=UnconstrainedMemory())
    for question in QUESTIONS:
        say((await agent.run(question)).last_message.text)
    with typed():
        show((await llm.run([UserMessage(QUESTION)], response_format=Verdict)).output_structured)


asyncio.run(main())
