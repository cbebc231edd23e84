"""A calculator as an MCP server over stdio. It needs nothing but Python.

    python recipes/calc/calculator.py

A server is started for every rollout, so what matters is how fast it starts: the four methods of the protocol that a
client of tools needs are written out here. Any other MCP server will do in its place.

Expressions have numbers, + - * / // % ** and brackets; they are read, never run. Fractions are kept exact until the
result is written: 1 / 3 * 3 is 1.
"""

import ast
import json
import operator
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

TOOL = {
    "name": "calculator",
    "description": "Compute an arithmetic expression.",
    "inputSchema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)
LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**50
"""No number on the way may be larger, or have a larger denominator."""

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def compute(expression: str) -> Fraction:
    """The value of an expression. Raises `ValueError` with what is wrong with it.

    >>> compute("37 * 52"), compute("(1 + 2) / 6"), compute("1,200 x 3 ÷ 8"), compute("0.1 + 0.2")
    (Fraction(1924, 1), Fraction(1, 2), Fraction(450, 1), Fraction(3, 10))
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    text = re.sub(r"(?<=[\d)])\s*[x×]\s*(?=[\d(])", "*", expression.replace(",", ""))
    text = text.replace("÷", "/").replace("^", "**").strip()
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("give numbers and operators, like 12 + 34") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant() if NUMBER.fullmatch(written := ast.get_source_segment(text, node) or ""):
            value = Fraction(written)  # 0.1 is a tenth, not the float next to it
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _value(node.operand, text) * (-1 if isinstance(node.op, ast.USub) else 1)
        case ast.BinOp(op=ast.Pow()):
            base, power = _value(node.left, text), _value(node.right, text)
            if power.denominator != 1 or abs(power) > 64:
                raise ValueError("powers are whole numbers up to 64")
            value = base ** int(power)
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            value = Fraction(OPERATORS[type(op)](_value(node.left, text), _value(node.right, text)))
        case _:
            raise ValueError("give numbers and operators, like 12 + 34")
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ValueError("the numbers are too large")
    return value


def write(value: Fraction) -> str:
    """
    >>> write(Fraction(1924)), write(Fraction(1, 2)), write(Fraction(-2, 3))
    ('1924', '0.5', '-0.666667')
    """
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")


def calculator(arguments: Any) -> dict[str, Any]:
    """The result of a tool call, as MCP has it; what is wrong with the call is a result too."""
    try:
        text, wrong = write(compute(str(arguments["expression"]))), False
    except ValueError as error:
        text, wrong = f"error: {error}", True
    except (KeyError, TypeError):
        text, wrong = 'error: arguments look like {"expression": "12 + 34"}', True
    return {"content": [{"type": "text", "text": text}], "isError": wrong}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """What is said to a request, or None to one that is not known."""
    match method:
        case "initialize":
            server = {"name": "calculator", "version": "1.0"}
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": server,
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return calculator(params.get("arguments"))
        case "ping":
            return {}
        case _:
            return None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:  # a notification: nobody waits for an answer
            continue
        result = answer(request["method"], request.get("params") or {})
        said = {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said}), flush=True)


if __name__ == "__main__":
    main()
