"""A service with an agent in it: an OpenAI Agents SDK agent solves word problems with a calculator, behind FastAPI.

It runs in an environment of its own that has no Strop in it, started like any other service:

    OPENAI_BASE_URL=http://127.0.0.1:9601/v1 python -m uvicorn --app-dir recipes/service agent:app --port 9600

One client serves all tasks. Which of them a model call is for is said by the header `trace_id`: it comes with the task
and goes on with every call, as services do that are traced.

    POST /solve  trace_id: 4f1c...  {"task": {"data": {"question": "Tom has 3 boxes of 12 pens. ..."}}}
    {"answer": "It is 31.", "calculations": [{"expression": "3 * 12 - 5", "result": "31", "steps": ["36", "31"]}]}

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
    steps: list[str]
    """What its operations gave, one after another; the last one is the result."""


def calculator(context: RunContextWrapper[list[Calculation]], expression: str) -> str:
    """Compute an arithmetic expression."""
    done = calculate(expression)
    context.context.append(done)
    return done.result


LONGEST = 200
"""Characters of an expression."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> Calculation:
    """
    >>> calculate("37 * 52 + 1").steps, calculate("(1 + 2) / 4").result
    (['1924', '1925'], '0.75')
    >>> calculate("9 ** 9").result
    'error: write numbers with + - * / and brackets, like 12 + 34'
    """
    steps: list[str] = []

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                steps.append(written(given := OPERATORS[type(op)](value(left), value(right))))
                return given
        raise ValueError(ast.dump(node))

    try:
        if len(expression) > LONGEST:
            raise ValueError(expression)
        result = written(value(ast.parse(expression.replace(",", "").strip(), mode="eval").body))
        return Calculation(expression, result, steps)
    except ZeroDivisionError:
        return Calculation(expression, "error: division by zero", [])
    except (ValueError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return Calculation(expression, "error: write numbers with + - * / and brackets, like 12 + 34", [])


def written(number: float) -> str:
    """
    >>> written(12.0), written(2 / 3)
    ('12', '0.666667')
    """
    number = round(number, 6)
    return str(int(number) if number == int(number) else number)


model = OpenAIChatCompletionsModel("gpt-4.1-mini", AsyncOpenAI(api_key="-"))  # the gateway answers for any model
solver = Agent[list[Calculation]](
    name="Solver",
    instructions="Solve the problem with the calculator, then say the answer.",
    model=model,
    model_settings=ModelSettings(tool_choice="required"),  # in its first turn, that is; then it may answer
    tools=[function_tool(calculator)],
)
nano = Agent[list[Calculation]](
    name="Nano",
    model=model,
    tools=[function_tool(calculator, description_override="Compute one operation on two integers.")],
)


def example(question: str, expression: str) -> list[Any]:
    """A conversation as it should go, to be shown before the question: a small model follows examples, not orders."""
    call = {"call_id": expression, "name": "calculator", "arguments": json.dumps({"expression": expression})}
    result = calculate(expression).result
    return [
        {"role": "user", "content": question},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": expression, "output": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


EXAMPLES = [
    *example("Bo had 40 dollars. He bought 2 shirts for 9 dollars each. How much is left?", "40 - 2 * 9"),
    *example("Kim is 7 years old. Her mother is 4 times as old. How old are they together?", "7 + 7 * 4"),
    *example("There were 31 birds. 18 more came, then 6 left. How many birds are there now?", "31 + 18 - 6"),
    *example("Sue reads 60 pages in 4 days. How many pages does she read in 5 days?", "60 / 4 * 5"),
    *example("There are 3 boxes. Each has 12 pens, and a pen costs $2. What do all pens cost?", "3 * 12 * 2"),
    *example("Ann has 8 red and 15 blue pens. Ben has 3 times as many. How many has he?", "(8 + 15) * 3"),
]

app = FastAPI()


class Problem(BaseModel):
    question: str


class Given(BaseModel):
    data: Problem


class Posted(BaseModel):
    task: Given


class Solved(BaseModel):
    answer: str
    calculations: list[Calculation]


@app.post("/solve")
async def solve(
    posted: Posted,
    trace_id: Annotated[str, Header(convert_underscores=False)],
    agent: Literal["solver", "nano"] = "solver",
) -> Solved:
    """Solve a task. What the model cannot finish has no answer, and is not an error of the service."""
    question = {"role": "user", "content": posted.task.data.question}
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
