"""An AutoGen assistant with a calculator, which is an MCP server.

    task      {"question": "Ann has 12 pens and buys 5 more. How many has she?", "answer": "17"}
    model     calculator(expression="12 + 5")
    server    17
    model     17
    returned  {"answer": "17", "computed": ["17"]}

Nothing here knows about training: the client's address is all that AutoGen's users do not write already. What the
answer is worth is said in reward.py.
"""

import sys
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage, ToolCallExecutionEvent
from autogen_core import FunctionCall
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import ToolOverride
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

CALCULATOR = StdioServerParams(command=sys.executable, args=[str(Path(__file__).with_name("calculator.py"))])
MODEL = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")


async def solve(
    task: Any,
    llm: Any,
    system: str | None = None,
    examples: list[LLMMessage] | None = None,
    overrides: dict[str, ToolOverride] | None = None,
) -> Any:
    client = OpenAIChatCompletionClient(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, model_info=MODEL)
    try:
        async with McpWorkbench(CALCULATOR, overrides) as workbench:
            agent = AssistantAgent(
                "solver",
                model_client=client,
                workbench=workbench,
                system_message=system,
                model_context=UnboundedChatCompletionContext(examples),
                max_tool_iterations=4,
            )
            result = await agent.run(task=task.data["question"])
    finally:
        await client.close()
    last = result.messages[-1]
    return {
        "answer": last.content if isinstance(last, TextMessage) else "",  # "": it was calling tools until the end
        "computed": [
            done.content
            for message in result.messages
            if isinstance(message, ToolCallExecutionEvent)
            for done in message.content
            if not done.is_error
        ],
    }


# --- the same for models that know little of tools ------------------------------------------------------------------

KNOWN = {"calculator": ToolOverride(description="Compute one operation on two integers.")}
SYSTEM = "Solve problems with the calculator."
EXAMPLES = [
    ("Tom has 12 pens and buys 5 more. How many pens does he have?", "12 + 5", "17"),
    ("Ann had 40 cards and gave away 14. How many are left?", "40 - 14", "26"),
    ("There are 6 bags with 7 apples each. How many apples are there?", "6 * 7", "42"),
    ("24 pens are put in 3 boxes. How many are in each box?", "24 / 3", "8"),
    ("Sue has 15 books and Ben has 9. How many more books does Sue have?", "15 - 9", "6"),
    ("There were 31 birds and 18 joined them. How many birds are there now?", "31 + 18", "49"),
]


async def solve_nano(task: Any, llm: Any) -> Any:
    """The model in the box knows one tool, by this very description."""
    return await solve(task, llm, overrides=KNOWN)


async def solve_shown(task: Any, llm: Any) -> Any:
    """A small model has to be shown: examples stand before the question as if they had been asked and answered."""
    return await solve(task, llm, SYSTEM, [message for example in EXAMPLES for message in shown(*example)])


def shown(question: str, expression: str, result: str) -> list[LLMMessage]:
    call = FunctionCall(id="example", name="calculator", arguments=f'{{"expression": "{expression}"}}')
    done = FunctionExecutionResult(content=result, name="calculator", call_id="example", is_error=False)
    return [
        UserMessage(content=question, source="user"),
        AssistantMessage(content=[call], source="solver"),
        FunctionExecutionResultMessage(content=[done]),
        AssistantMessage(content=result, source="solver"),
    ]
