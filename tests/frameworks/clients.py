"""The clients and agents of the table in docs/guides/clients.md: programs of agents/, each in its environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from strop.engines.scripted import ScriptedRequest
from tests.frameworks.model import ANSWERS, NOTE, answer, read_note


class Client(Struct, frozen=True):
    """`package` is the one whose version counts, `command` a file of agents/ with its arguments, `script` what the
    model says, `answers` what the program prints."""

    name: str
    package: str
    environment: str
    command: str
    script: Callable[[ScriptedRequest], str | None] = answer
    answers: tuple[str, ...] = tuple(ANSWERS)


def coder(name: str, package: str, environment: str, command: str, tool: str, arguments: dict[str, Any]) -> Client:
    """A coding agent, which is to read a note with its own tool."""
    script = partial(read_note, name=tool, arguments=arguments)
    return Client(name, package, environment, command, script, (f"The note says {NOTE}.",) * 2)


CLIENTS = [
    Client("OpenAI Python", "openai", "openai", "openai_python.py"),
    Client("OpenAI Python, streamed", "openai", "openai", "openai_python.py --stream"),
    Client("OpenAI Python", "openai", "openai", "openai_python.py --responses"),
    Client("OpenAI Python, streamed", "openai", "openai", "openai_python.py --responses --stream"),
    Client("OpenAI Python, AsyncOpenAI, previous_response_id", "openai", "openai", "openai_python.py --async"),
    Client("Anthropic Python", "anthropic", "openai", "anthropic_python.py"),
    Client("Anthropic Python, streamed", "anthropic", "openai", "anthropic_python.py --stream"),
    Client("Anthropic Python, tool_runner", "anthropic", "openai", "anthropic_python.py --runner"),
    Client("LangChain, LangGraph", "langchain-openai", "openai", "langgraph_agent.py --typed"),
    Client("LangChain, LangGraph", "langchain-openai", "openai", "langgraph_agent.py --typed --tool --stream"),
    Client("LangChain, LangGraph", "langchain-openai", "openai", "langgraph_agent.py --typed --responses"),
    Client("LangChain, LangGraph", "langchain-anthropic", "openai", "langgraph_agent.py --typed --anthropic"),
    Client("Pydantic AI, ToolOutput", "pydantic-ai-slim", "openai", "pydantic_agent.py --typed"),
    Client("Pydantic AI, NativeOutput", "pydantic-ai-slim", "openai", "pydantic_agent.py --typed --native"),
    Client("Pydantic AI, PromptedOutput", "pydantic-ai-slim", "openai", "pydantic_agent.py --typed --prompted"),
    Client("Pydantic AI, NativeOutput", "pydantic-ai-slim", "openai", "pydantic_agent.py --typed --responses --native"),
    Client("Pydantic AI, ToolOutput", "pydantic-ai-slim", "openai", "pydantic_agent.py --typed --anthropic"),
    Client("OpenAI Agents", "openai-agents", "openai", "openai_agents.py --typed"),
    Client("OpenAI Agents", "openai-agents", "openai", "openai_agents.py --typed --responses"),
    Client("AutoGen", "autogen-agentchat", "openai", "autogen_agent.py --typed"),
    Client("AgentScope", "agentscope", "openai", "agentscope_agent.py --typed"),
    Client("smolagents, ToolCallingAgent", "smolagents", "openai", "smolagents_agent.py --typed"),
    Client("smolagents, CodeAgent", "smolagents", "openai", "smolagents_agent.py --code"),
    Client("CrewAI", "crewai", "crewai", "crewai_agent.py --typed"),
]
