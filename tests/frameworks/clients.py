"""The clients and agents of the table in docs/guides/clients.md: programs of agents/, each in its environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from strop.engines.scripted import ScriptedRequest
from tests.frameworks.model import ANSWERS, NOTE, answer, edit, read_note, submit


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


MARKED = "[[ ## verdict ## ]]\n%s\n\n[[ ## completed ## ]]"

READ = "cat note.txt"

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
    Client("Haystack", "haystack-ai", "openai", "haystack_agent.py"),
    Client("Semantic Kernel", "semantic-kernel", "openai", "semantic_kernel_agent.py"),
    Client("Outlines", "outlines", "openai", "outlines_client.py", answers=()),
    Client("Agent Framework", "agent-framework-openai", "openai", "agent_framework_agent.py"),
    Client("Agent Framework", "agent-framework-openai", "openai", "agent_framework_agent.py --responses --stream"),
    Client("Magentic", "magentic", "openai", "magentic_client.py", script=partial(answer, quiet=True)),
    Client("Agno", "agno", "openai", "agno_agent.py"),
    Client("Agno", "agno", "openai", "agno_agent.py --responses"),
    Client("Agno", "agno", "openai", "agno_agent.py --anthropic --stream"),
    Client("AG2", "ag2", "openai", "ag2_agent.py"),
    Client("Griptape", "griptape", "openai", "griptape_agent.py"),
    Client("Claude Agent SDK", "claude-agent-sdk", "openai", "claude_sdk_agent.py"),
    Client("LiteLLM", "litellm", "litellm", "litellm_client.py"),
    Client("LiteLLM, streamed", "litellm", "litellm", "litellm_client.py --stream"),
    Client("LiteLLM", "litellm", "litellm", "litellm_client.py --anthropic"),
    Client("LlamaIndex", "llama-index-llms-openai-like", "litellm", "llama_index_agent.py"),
    Client("Strands", "strands-agents", "litellm", "strands_agent.py"),
    Client("Instructor, TOOLS", "instructor", "litellm", "instructor_client.py", answers=()),
    Client("Instructor, JSON", "instructor", "litellm", "instructor_client.py --json", answers=()),
    Client("Instructor, JSON_SCHEMA", "instructor", "litellm", "instructor_client.py --schema", answers=()),
    Client("DSPy, ChatAdapter", "dspy", "litellm", "dspy_agent.py", partial(answer, form=MARKED), ()),
    Client("DSPy, JSONAdapter", "dspy", "litellm", "dspy_agent.py --json", partial(answer, form='{"verdict": %s}'), ()),
    Client("Google ADK, LiteLLM", "google-adk", "litellm", "adk_agent.py"),
    Client("BeeAI", "beeai-framework", "litellm", "beeai_agent.py"),
    Client("CAMEL", "camel-ai", "crewai", "camel_agent.py"),
    Client("browser-use, ChatOpenAI", "browser-use", "browser-use", "browser_use_client.py", answers=()),
    Client("OpenAI Node, runTools", "openai", "node", "node/agent.mjs --stream"),
    Client("OpenAI Node", "openai", "node", "node/openai_node.mjs"),
    Client("OpenAI Node, streamed", "openai", "node", "node/openai_node.mjs --stream"),
    Client("Anthropic Node, toolRunner", "@anthropic-ai/sdk", "node", "node/anthropic_node.mjs"),
    Client("AI SDK, @ai-sdk/openai", "ai", "node", "node/ai_sdk.mjs"),
    Client("AI SDK, @ai-sdk/openai", "ai", "node", "node/ai_sdk.mjs --chat --stream"),
    Client("AI SDK, @ai-sdk/openai-compatible", "ai", "node", "node/ai_sdk.mjs --compatible"),
    Client("AI SDK, @ai-sdk/anthropic", "ai", "node", "node/ai_sdk.mjs --anthropic"),
    Client("LangChain.js", "@langchain/openai", "node", "node/langchain_node.mjs"),
    Client("LangChain.js", "@langchain/anthropic", "node", "node/langchain_node.mjs --anthropic"),
    Client("OpenAI Agents JS", "@openai/agents", "node", "node/openai_agents.mjs"),
    Client("OpenAI Agents JS", "@openai/agents", "node", "node/openai_agents.mjs --chat"),
    coder("Claude Code", "@anthropic-ai/claude-code", "coding", "claude_code.sh", "Bash", {"command": READ}),
    coder("Codex", "@openai/codex", "coding", "codex.sh", "exec_command", {"cmd": READ}),
    coder("opencode", "opencode-ai", "coding", "opencode.sh", "bash", {"command": READ, "description": "Reads"}),
    coder("Qwen Code", "@qwen-code/qwen-code", "coding", "qwen_code.sh", "run_shell_command", {"command": READ}),
    Client("mini-swe-agent", "mini-swe-agent", "litellm", "mini_swe.sh", submit, (NOTE,)),
    Client("aider", "aider-chat", "aider", "aider.sh", edit, ("owls",)),
    coder("pi", "@earendil-works/pi-coding-agent", "coding", "pi.sh", "bash", {"command": READ}),
]
