"""browser-use's own client, as its agent asks with it: an answer of a type."""

import asyncio
import os

from browser_use import ChatOpenAI
from browser_use.llm.messages import UserMessage
from cities import MODEL
from verdict import QUESTION, Verdict, show, typed


async def main() -> None:
    llm = ChatOpenAI(MODEL, base_url=os.environ["OPENAI_BASE_URL"])
    with typed():
        show((await llm.ainvoke([UserMessage(content=QUESTION)], output_format=Verdict)).completion)


asyncio.run(main())
