"""A stock ReAct agent of LangGraph's: LangChain's `create_agent`, a chat model and a tool. Strop's part is the address.

task      {"messages": [{"role": "user", "content": "What is 37 * 52?"}], "calls": ["37 * 52"], "answer": "1924"}
rewards   {"reward": 1.0, "right_call": 1.0, "call": 1.0}
"""

import operator
import re
from fractions import Fraction

from langchain.agents import create_agent
from langchain.messages import AIMessage, AnyMessage
from langchain.tools import tool
from langchain_openai import ChatOpenAI

from strop import LLM, Task
from strop.rewards import last_number, math_equal

MOST_CALLS = 8  # of the model, in one rollout; who needs more has failed
NUMBER = r"(-?\d{1,12}(?:\.\d{1,6})?)"
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@tool
def calculator(expression: str) -> str:
    """Compute one operation on two integers."""  # decimals too; strop/nano knows these very words
    found = re.fullmatch(rf"\s*{NUMBER}\s*([-+*/])\s*{NUMBER}\s*", expression, re.ASCII)
    if found is None:
        return "error: give one operation on two integers, like 12 + 34"
    try:
        result = OPERATIONS[found[2]](Fraction(found[1]), Fraction(found[3]))
    except ZeroDivisionError:
        return "error: nothing can be divided by 0"
    return str(result) if result.denominator == 1 else f"{float(result):.6f}".rstrip("0").rstrip(".")


def solve(task: Task, llm: LLM) -> dict[str, float]:
    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    agent = create_agent(model, [calculator])
    asked = task.data["messages"]
    said = agent.invoke({"messages": asked}, {"recursion_limit": 2 * MOST_CALLS})["messages"]
    return score(task, said[len(asked) :])


def score(task: Task, messages: list[AnyMessage]) -> dict[str, float]:
    """`call`: the tool was called. `right_call`: with all that the question needs, where that is known. `reward`: so it
    was, and the last number of the answer is right."""
    said = [message for message in messages if isinstance(message, AIMessage)]
    made = {"".join(str(call["args"].get("expression")).split()) for one in said for call in one.tool_calls}
    right_call = made >= {"".join(needed.split()) for needed in task.data.get("calls", ())}
    right = math_equal(last_number(said[-1].text), task.data["answer"])
    return {"reward": float(right and right_call), "right_call": float(right_call), "call": float(bool(made))}
