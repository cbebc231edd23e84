"""Word problems whose answer is a number: Calc-X, and the sets it was made of.

    tasks("MU-NLPC/Calc-mawps")         from the Hugging Face hub, by name
    tasks("svamp.jsonl")                a file or a folder, with rows of any shape below
    tasks("mawps.jsonl,svamp.jsonl")    several together
    tasks("made")                       the demo's questions in Calc-X's shape; nothing is downloaded

    Calc-X (MU-NLPC/Calc-X, Calc-mawps, Calc-svamp, ...)   question, chain, result
    GSM8K                                                  question, answer (the number after ####)
    SVAMP                                                  Body, Question, Answer
    ASDiv                                                  body, question, answer (with its unit in brackets)
    MAWPS                                                  input, target

A set's own splits are kept if it has both train and test. Otherwise questions are divided by the numbers in them: what
is asked twice in other words is not trained on and tested. Left out are answers that are not numbers (AQuA-RAT's
letters) and questions that were there already.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from strop import demo
from strop.errors import TaskError
from strop.rewards import after_hashes
from strop.tasks.load import load
from strop.types import Task

HELD_OUT = 8
"""One question in so many is a test question, where a set has no splits of its own."""


def tasks(data: str = "made", single: bool = False) -> list[Task]:
    """Tasks `{"question": ..., "answer": "17"}`.

    `single` keeps the easiest ones: two numbers stand in the question, and the answer is one operation on them.
    """
    found: dict[str, Task] = {}
    for task in rows(data):
        question, answer = read(task.data)
        if answer is None or question in found or (single and not one_operation(question, answer)):
            continue
        found[question] = Task(id=task.id, split=task.split, data={"question": question, "answer": str(answer)})
    if not found:
        raise TaskError(f"no word problems in {data}: its rows have none of the shapes in recipes/calc/data.py")
    return list(found.values())


def rows(data: str) -> Iterator[Task]:
    """Every row of every set as it is, with an id and a split."""
    names = [name.strip() for name in data.split(",")]
    for number, name in enumerate(names):
        try:
            found = made() if name == "made" else load(name, **({"name": "main"} if name == "openai/gsm8k" else {}))
        except TaskError as error:
            raise TaskError(f"{error}; a copy of it elsewhere is given with --data PATH") from error
        # Sets repeat each other's problems in other words: several are divided together.
        divided = len(names) == 1 and {"train", "test"} <= {task.split for task in found}
        for task in found:
            yield Task(
                id=task.id if len(names) == 1 else f"{number}-{Path(name).stem}-{task.id}",
                split=task.split if divided else held_out(read(task.data)[0]),
                data=task.data,
            )


def read(row: Mapping[str, Any]) -> tuple[str, Fraction | None]:
    """The question and the answer of a row; the answer is None where the row has no number for one.

    >>> read({"question": "How much is 2/3 of 9?", "chain": "", "result": "6"})
    ('How much is 2/3 of 9?', Fraction(6, 1))
    >>> read({"body": "Ann has 2 pens.", "question": "How many has she?", "answer": "2 (pens)"})
    ('Ann has 2 pens. How many has she?', Fraction(2, 1))
    """
    match row:
        case {"question": question, "result": answer}:
            pass
        case {"Body": body, "Question": question, "Answer": answer}:
            question = _together(body, question)
        case {"body": body, "question": question, "answer": answer}:
            question, answer = _together(body, question), str(answer).partition("(")[0]
        case {"question": question, "answer": answer}:
            answer = after_hashes(answer)
        case {"input": question, "target": answer}:
            pass
        case _:
            return "", None
    try:
        return " ".join(question.split()), Fraction(str(answer).replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return question, None


def _together(body: str, question: str) -> str:
    """Some bodies end in the middle of the sentence that the question finishes."""
    return f"{body.strip()} {question.strip()}"


def numbers(question: str) -> list[Fraction]:
    """
    >>> numbers("She paid $1,250 for 3 of them, 2.5 each.")
    [Fraction(1250, 1), Fraction(3, 1), Fraction(5, 2)]
    """
    return [Fraction(found) for found in re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", question))]


def one_operation(question: str, answer: Fraction) -> bool:
    """
    >>> one_operation("Ann has 7 pens and loses 2.", Fraction(5)), one_operation("Ann has 7 pens.", Fraction(7))
    (True, False)
    """
    if len(found := numbers(question)) != 2:
        return False
    a, b = found
    return answer in (a + b, a - b, b - a, a * b, b and a / b, a and b / a)


def held_out(question: str) -> str:
    key = " ".join(map(str, sorted(numbers(question)))) or question
    return "test" if zlib.crc32(key.encode()) % HELD_OUT == 0 else "train"


def made() -> list[Task]:
    """The demo's questions as rows of Calc-X.

    >>> made()[0].data["chain"]
    '<gadget id="calculator">404 - 43</gadget>\\n<output>361</output>\\n\\n<result>361</result>'
    """
    return [
        Task(id=f"made__{task.id}", split=task.split, data=_row(**task.data))
        for task in demo.tasks("calc")
        if task.split != "long"
    ]


def _row(question: str, calls: list[str], answer: int) -> dict[str, Any]:
    steps = [f'<gadget id="calculator">{call}</gadget>\n<output>{demo.calculator(call)}</output>' for call in calls]
    chain = "\n\n".join([*steps, f"<result>{answer}</result>"])
    return {"question": question, "chain": chain, "result": str(answer)}
