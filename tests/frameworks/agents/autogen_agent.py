"""AutoGen's AgentChat: an assistant that calls tools until it has an answer."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from verdict import QUESTION, Verdict, show, typed


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": TYPED,
            "family": "unknown",
        },
    )
    agent = AssistantAgent(
        "cities",
        model_client=client,
        tools=[lookup, add],
        system_message=SYSTEM,
        max_tool_iterations=5,
        model_client_stream=STREAM,
    )
    for question in QUESTIONS:
        if STREAM:
            items = [item async for item in agent.run_stream(task=question)]
            result = items[-1]
        else:
            result = await agent.run(task=question)
        assert isinstance(result, TaskResult)
        say(result.messages[-1].content)
    if TYPED:
        with typed():
            asked = [UserMessage(content=QUESTION, source="user")]
            show((await client.create(asked, json_output=Verdict)).content)
    await client.close()


asyncio.run(main())
