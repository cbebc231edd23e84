"""LlamaIndex: an agent that calls functions."""

import asyncio
import os

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from verdict import QUESTION, Verdict, show, typed

llm = OpenAILike(
    MODEL,
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
)


async def main() -> None:
    agent = FunctionAgent(tools=[lookup, add], llm=llm, system_prompt=SYSTEM, streaming=STREAM)
    context = Context(agent)
    for question in QUESTIONS:
        say(await agent.run(question, ctx=context))
    with typed():
        show((await llm.as_structured_llm(Verdict).acomplete(QUESTION)).raw)


asyncio.run(main())
