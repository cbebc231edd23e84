"""CAMEL: a chat agent."""

import os

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from cities import MODEL, QUESTIONS, SYSTEM, add, lookup, say
from verdict import QUESTION, Verdict, show, typed


class Letters(BaseTokenCounter):
    """Its own would be fetched."""

    def count_tokens_from_messages(self, messages) -> int:
        return len(str(messages)) // 4

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


model = ModelFactory.create(
    model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    model_type=MODEL,
    url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    token_counter=Letters(),
)
agent = ChatAgent(SYSTEM, model=model, tools=[FunctionTool(lookup), FunctionTool(add)])
for question in QUESTIONS:
    say(agent.step(question).msg.content)
with typed():
    show(ChatAgent(model=model).step(QUESTION, response_format=Verdict).msg.parsed)
