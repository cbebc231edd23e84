"""A service with an agent in it: an OpenAI Agents SDK agent solves word problems with a calculator, behind FastAPI.

It runs in an environment of its own that has no Strop in it, started like any other service:

    OPENAI_BASE_URL=http://127.0.0.1:9601/v1 python -m uvicorn --app-dir recipes/service agent:app --port 9600

One client serves all tasks. Which of them a model call is for is said by the header `trace_id`: it comes with the task
and goes on with every call, as services do that are traced.

    POST /solve  trace_id: 4f1c...  {"task": {"data": {"question": "Tom has 3 boxes of 12 pens. ..."}}}
    {"answer": "36", "calculations": [{"expression": "3 * 12", "result": "36"}]}

`POST /solve?agent=nano` is for strop/nano, which understands nothing but the demo's tool, and no instructions.
"""

import ast
import json
import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
)
from fastapi import FastAPI, Header
from openai import AsyncOpenAI
from pydantic import BaseModel

MAX_TURNS = 5


@dataclass
class Calculation:
    expression: str
    result: str


def calculator(context: RunContextWrapper[list[Calculation]], expression: str) -> str:
    """Compute an arithmetic expression."""
    result = calculate(expression)
    context.context.append(Calculation(expression, result))
    return result


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """
    >>> calculate("37 * 52"), calculate("(1 + 2) / 4"), calculate("9 ** 9")
    ('1924', '0.75', 'error: write numbers with + - * / and brackets, like 12 + 34')
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(ast.dump(node))

    try:
        number = round(value(ast.parse(expression[:200].replace(",", ""), mode="eval").body), 6)
        return str(int(number) if number == int(number) else number)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return "error: write numbers with + - * / and brackets, like 12 + 34"


model = OpenAIChatCompletionsModel("gpt-4.1-mini", AsyncOpenAI(api_key="-"))  # the gateway answers for any model
solver = Agent[list[Calculation]](
    name="Solver",
    instructions="Solve the problem step by step. Use the calculator for every step, then say the answer.",
    model=model,
    model_settings=ModelSettings(tool_choice="required"),  # in its first turn, that is; then it may answer
    tools=[function_tool(calculator)],
)
nano = Agent[list[Calculation]](
    name="Nano",
    model=model,
    tools=[function_tool(calculator, description_override="Compute one operation on two integers.")],
)


def example(question: str, *expressions: str) -> list[Any]:
    """A conversation as it should go, to be shown before the question: a small model follows examples, not orders."""
    items: list[Any] = [{"role": "user", "content": question}]
    for expression in expressions:
        call = {"call_id": expression, "name": "calculator", "arguments": json.dumps({"expression": expression})}
        items.append({"type": "function_call", **call})
        items.append({"type": "function_call_output", "call_id": expression, "output": calculate(expression)})
    return [*items, {"role": "assistant", "content": f"The answer is {calculate(expressions[-1])}."}]


EXAMPLES = [
    *example("Bo had 40 dollars. He bought 2 shirts for 9 dollars each. How much is left?", "2 * 9", "40 - 18"),
    *example("Kim is 7 years old. Her mother is 4 times as old. How old are they together?", "7 * 4", "7 + 28"),
    *example("Tom has 3 boxes of 12 pens. He gives 5 pens away. How many pens are left?", "3 * 12", "36 - 5"),
]

app = FastAPI()


class Posted(BaseModel):
    task: dict[str, Any]


class Solved(BaseModel):
    answer: str
    calculations: list[Calculation]


@app.post("/solve")
async def solve(
    posted: Posted,
    trace_id: Annotated[str, Header(convert_underscores=False)],
    agent: Literal["solver", "nano"] = "solver",
) -> Solved:
    """Solve a task. What the model cannot finish has no answer, and is no error of the service."""
    question = {"role": "user", "content": posted.task["data"]["question"]}
    settings = ModelSettings(extra_headers={"trace_id": trace_id})
    done: list[Calculation] = []
    try:
        result = await Runner.run(
            nano if agent == "nano" else solver,
            [question] if agent == "nano" else [*EXAMPLES, question],
            context=done,
            max_turns=MAX_TURNS,
            run_config=RunConfig(model_settings=settings, tracing_disabled=True),
        )
    except (MaxTurnsExceeded, ModelBehaviorError):  # it would not stop calculating, or called a tool that there is not
        return Solved(answer="", calculations=done)
    return Solved(answer=str(result.final_output), calculations=done)


@app.get("/health")
async def health() -> str:
    return "ok"
