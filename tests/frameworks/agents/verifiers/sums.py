"""Environments as verifiers' documentation of 0.1 writes them, of each kind: `load_environment(kind=...)`."""

import ast
import operator
import re

import verifiers as vf
from datasets import Dataset

QUESTIONS = [{"question": f"Use the calculator: {a} * {b}.", "answer": str(a * b)} for a in (12, 37) for b in (45, 52)]
OPERATORS = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub}


def said(completion) -> str:
    return str(completion[-1].get("content") or "") if completion else ""


def right(completion, answer) -> float:
    return float(answer in re.findall(r"\d+", said(completion)))


def length(completion) -> float:
    return float(sum(len(str(message.get("content") or "")) for message in completion))


def rubric() -> vf.Rubric:
    return vf.Rubric(funcs=[right, length], weights=[1.0, 0.001])


def calculator(expression: str) -> str:
    """Compute one operation on two integers.

    Args:
        expression: what to compute
    """
    tree = ast.parse(expression, mode="eval").body
    return str(OPERATORS[type(tree.op)](tree.left.value, tree.right.value))


class Again(vf.MultiTurnEnv):
    """Asks again, twice."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"Again: {state['info']['question']}"}]


class Counted(vf.StatefulToolEnv):
    """A calculator that knows how often this rollout has used it."""

    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)
        self.add_tool(self.calculator, args_to_skip=["uses"])

    async def setup_state(self, state, **kwargs):
        state["uses"] = []
        return await super().setup_state(state, **kwargs)

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "uses": state["uses"]}

    async def calculator(self, expression: str, uses: list) -> str:
        """Compute one operation on two integers.

        Args:
            expression: what to compute
            uses: earlier ones
        """
        uses.append(expression)
        return calculator(expression)


def load_environment(kind: str = "single", broken: bool = False) -> vf.Environment:
    rows = [{**row, "info": {"question": row["question"]}} for row in QUESTIONS]
    given = {"dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:1]), "rubric": rubric()}
    if kind == "single":
        return vf.SingleTurnEnv(**given)
    if kind == "several":
        return Again(max_turns=3, **given)
    if kind == "tools":
        return vf.ToolEnv(tools=[calculator], max_turns=3, **given)
    if kind == "state":
        return Counted(max_turns=3, **given)
    if kind == "group":
        parts = [load_environment("single"), load_environment("tools")]
        return vf.EnvGroup(parts, env_names=["single", "tools"])
    if kind == "compared":

        def shortest(completions, **kwargs) -> list[float]:
            return [1.0 for _ in completions]

        return vf.SingleTurnEnv(**(given | {"rubric": vf.Rubric(funcs=[shortest])}))
    raise ValueError(f"there is no kind {kind}")
