"""Claude Agent SDK, with the Claude Code that comes with it: two tools in this process, and an answer of a type."""

import asyncio

import cities
from cities import MODEL, QUESTIONS, SYSTEM, say
from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    create_sdk_mcp_server,
    query,
    tool,
)
from verdict import QUESTION, SCHEMA, show, typed


@tool("lookup", "Look up how many people live in a city.", {"city": str})
async def lookup(given):
    return {"content": [{"type": "text", "text": str(cities.lookup(given["city"]))}]}


@tool("add", "Add two numbers.", {"a": int, "b": int})
async def add(given):
    return {"content": [{"type": "text", "text": str(cities.add(given["a"], given["b"]))}]}


async def main() -> None:
    server = create_sdk_mcp_server("cities", tools=[lookup, add])
    options = ClaudeAgentOptions(
        model=MODEL,
        system_prompt=SYSTEM,
        mcp_servers={"cities": server},
        allowed_tools=["mcp__cities__lookup", "mcp__cities__add"],
        setting_sources=[],
        env={"ENABLE_TOOL_SEARCH": "false"},  # all tools are shown from the start
    )
    async with ClaudeSDKClient(options) as client:
        for question in QUESTIONS:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    say(message.result)
    with typed():
        form = {"type": "json_schema", "schema": SCHEMA}
        async for message in query(prompt=QUESTION, options=ClaudeAgentOptions(model=MODEL, output_format=form)):
            if isinstance(message, ResultMessage):
                show(message.structured_output)


asyncio.run(main())
