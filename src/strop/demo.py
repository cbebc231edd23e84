"""The demo: an agent that learns to use its calculator.

The model in the box (`strop/models/nano`) can call the calculator and copy its result, but mostly does not bother: it
guesses a number instead. `agent` below is an ordinary OpenAI client loop; training it makes the model use the tool.

    task      {"question": "What is 37 * 52?", "calls": ["37 * 52"], "answer": 1924}
    model     calculator(expression="37 * 52")
    tool      1924
    model     37 * 52 = 1924.
    rewards   {"reward": 1.0, "right_call": 1.0}
"""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from strop.config import (
    AlgorithmConfig,
    Config,
    EngineConfig,
    LearnerConfig,
    LoopConfig,
    OptimConfig,
    PolicyConfig,
    RunnerConfig,
    SamplingConfig,
)
from strop.types import Task

AGENT = "strop.demo:agent"
MAX_TURNS = 4

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute one operation on two integers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def agent(task: Task, llm: Any) -> dict[str, float]:
    """Ask, run the tool calls the model requests, ask again, until it answers."""
    client = llm.client()
    messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
    expressions: list[str] = []
    answer = None
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            answer = message.content
            break
        for call in message.tool_calls:
            expression, result = run_tool(call.function.name, call.function.arguments)
            expressions.append(expression)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return score(task.data, expressions, answer)


def run_tool(name: str, arguments: str) -> tuple[str, str]:
    """The expression that was asked for and the tool's result, or "" and what was wrong with the call."""
    if name != "calculator":
        return "", f"error: there is no tool {name}"
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "", 'error: arguments look like {"expression": "12 + 34"}'
    return str(expression), calculator(str(expression))


def calculator(expression: str) -> str:
    """Compute one operation on two integers.

    Returns: the result as text, `calculator("37 * 52") == "1924"`, or what was wrong with the expression.
    """
    match = re.fullmatch(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*", expression, re.ASCII)
    if match is None:
        return "error: give one operation on two integers, like 12 + 34"
    left, operator, right = int(match[1]), match[2], int(match[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


def score(data: dict[str, Any], expressions: list[str], answer: str | None) -> dict[str, float]:
    """`right_call`: the share of the needed calls made, in order. `reward`: all of them, and the right answer.

    A right answer without the calls earns nothing: what is being learnt is to use the tool.
    """
    needed = ["".join(call.split()) for call in data["calls"]]
    num_right = 0
    for expression in expressions:
        if num_right < len(needed) and "".join(expression.split()) == needed[num_right]:
            num_right += 1
    numbers = re.findall(r"-?\d+", answer or "")
    right_answer = bool(numbers) and numbers[-1] == str(data["answer"])
    return {
        "reward": float(right_answer and num_right == len(needed)),
        "right_call": num_right / len(needed),
    }


# --- the run -------------------------------------------------------------------------------------------------------

INTRODUCTION = (
    "A model of a million parameters has a calculator and mostly does not use it: it guesses. The agent is a plain "
    "OpenAI client loop (strop/demo.py); it earns 1 for using the tool and getting the right answer, 0 otherwise. "
    "Watch it learn. ('test' are tasks that are held out of training; 'test-greedy' are the same at temperature 0.)\n"
)


def config(kind: str = "calc") -> Config:
    """What `strop demo` runs; every setting can be changed with --set."""
    sampling, steps = SamplingConfig(max_tokens=48), 24 if kind == "calc" else 40
    return Config(
        agent=AGENT,
        tasks="strop.demo:tasks",
        tasks_args={"kind": kind},
        policy=PolicyConfig(model="strop/nano", context=192, train=sampling, eval=sampling),
        algorithm=AlgorithmConfig(settings={"clip": 0.3}),
        learner=LearnerConfig(optim=OptimConfig(lr=3e-4, warmup=3, decay=steps + 4), token_budget=2048),
        engine=EngineConfig(max_sequences=16, prefill_chunk=64, deterministic=True, threads=1),
        runner=RunnerConfig(workers=16, timeout=60.0),
        loop=LoopConfig(steps=steps, checkpoint_every=5),
    )


# --- tasks ---------------------------------------------------------------------------------------------------------

WORDS = {"+": "plus", "-": "minus", "*": "times"}

# {x}: the expression in symbols, {w}: in words. The phrasings that name the calculator come last.
CALC_PHRASINGS = [
    "What is {x}?",
    "What is {w}?",
    "Compute {x}.",
    "How much is {w}?",
    "Please work out {x}.",
    "Tell me {w}.",
    "Use the calculator: {x}.",
    "With the calculator, how much is {w}?",
]

# {x} and {w}: the first operation, {o} and {n}: the second one.
CHAIN_PHRASINGS = [
    "What is ({x}) {o}?",
    "Compute {x}, then {o}.",
    "Take {w}, then {n}.",
    "Use the calculator: {x}, then {o}.",
]


def tasks(kind: str = "calc", seed: int = 0) -> list[Task]:
    """Tasks of one kind: "calc" needs one calculator call, "chain" two, the second on the first one's result.

    Splits: "train" and "test" share no pair of operands; "long" has operands of four digits, found nowhere else.
    """
    if kind not in ("calc", "chain"):
        raise ValueError(f'no tasks of kind {kind!r}: choose "calc" or "chain"')
    rng = random.Random(f"{kind} {seed}")
    found: list[Task] = []
    for split, count in (("train", 2000), ("test", 128), ("long", 64)):
        questions = _questions(kind, split, rng)
        found += [Task(id=f"{kind}-{split}-{i}", split=split, data=next(questions)) for i in range(count)]
    return found


def _questions(kind: str, split: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """An endless stream of different questions, the phrasings in turn."""
    make, phrasings = (calc, CALC_PHRASINGS) if kind == "calc" else (chain, CHAIN_PHRASINGS)
    seen: set[str] = set()
    while True:
        a, b = (_number(rng, 4 if split == "long" else 2 if kind == "chain" else rng.choice((2, 3))) for _ in "ab")
        question = make(phrasings[len(seen) % len(phrasings)], a, b, rng)
        if question["question"] not in seen and (split == "long" or held_out(a, b) == (split == "test")):
            seen.add(question["question"])
            yield question


def held_out(a: int, b: int) -> bool:
    """Whether a pair of operands belongs to the test split: one pair in nine, never trained on in either order."""
    return (a + b) % 9 == 0


def calc(phrasing: str, a: int, b: int, rng: random.Random) -> dict[str, Any]:
    """`{"question": "What is 37 * 52?", "calls": ["37 * 52"], "answer": 1924}`"""
    x, w = _operation(a, rng.choice("+-*"), b)
    return {"question": phrasing.format(x=x, w=w), "calls": [x], "answer": int(calculator(x))}


def chain(phrasing: str, a: int, b: int, rng: random.Random) -> dict[str, Any]:
    """`{"question": "What is (37 + 52) * 40?", "calls": ["37 + 52", "89 * 40"], "answer": 3560}`"""
    x, w = _operation(a, rng.choice("+-"), b)
    first, operator, c = calculator(x), rng.choice("+-*"), _number(rng, 2)
    second = f"{first} {operator} {c}"
    question = phrasing.format(x=x, w=w, o=f"{operator} {c}", n=f"{WORDS[operator]} {c}")
    return {"question": question, "calls": [x, second], "answer": int(calculator(second))}


def _operation(a: int, operator: str, b: int) -> tuple[str, str]:
    """The operation in symbols and in words; differences are written so that they are not negative."""
    if operator == "-":
        a, b = max(a, b), min(a, b)
    return f"{a} {operator} {b}", f"{a} {WORDS[operator]} {b}"


def _number(rng: random.Random, num_digits: int) -> int:
    return rng.randrange(10 ** (num_digits - 1), 10**num_digits)
