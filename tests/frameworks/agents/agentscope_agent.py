"""AgentScope."""

import asyncio
import os

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from verdict import QUESTION, Verdict, show, typed

allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="These only read and calculate.")


async def main() -> None:
    credential = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
    agent = Agent(
        name="cities",
        system_prompt=SYSTEM,
        model=OpenAIChatModel(credential, MODEL, stream=STREAM),
        toolkit=Toolkit(tools=[FunctionTool(tool, permission=allowed) for tool in (lookup, add)]),
    )
    for question in QUESTIONS:
        reply = await agent.reply(UserMsg(name="user", content=question))
        say(reply.get_text_content())
    if TYPED:
        with typed():
            model = OpenAIChatModel(credential, MODEL, stream=False)
            reply = await model.generate_structured_output([UserMsg(name="user", content=QUESTION)], Verdict)
            show(reply.content)


asyncio.run(main())
