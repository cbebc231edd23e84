"""GSM8K as tasks, or problems of the same shape that are made here.

    a row     {"question": "Tom has 3 boxes of 12 pens. ...", "answer": "... 3*12=<<3*12=36>>36 pens.\\n#### 36"}
    its task  {"question": "Tom has 3 boxes of 12 pens. ...", "results": ["36"], "answer": "36"}

Its solutions mark every calculation, so that one can tell how many steps a problem takes.
"""

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from strop import demo
from strop.errors import TaskError
from strop.tasks.load import load
from strop.types import Task

Row = dict[str, Any]
SPLITS = ("train", "test")
MARKED = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
"""A calculation and its result, as solutions have them."""


def tasks(
    data: str = "openai/gsm8k", steps: int | None = None, letters: int | None = None, stated: bool = False
) -> list[Task]:
    """Tasks of GSM8K's splits `train` and `test`. `data` is the data set's name, a folder with its train.jsonl and
    test.jsonl, or "made". With `steps` and `letters`, only problems of at most so many calculations that are at most so
    long; with `stated`, only those that state all that is calculated with (see `is_stated`)."""
    found: list[Task] = []
    for split, several in rows(data).items():
        for number, row in enumerate(several):
            try:
                task = Task(id=f"{split}-{number}", split=split, data=problem(row))
            except (KeyError, AttributeError):
                raise TaskError(f"{data}, {split}: row {number} has no question and answer that are text") from None
            short = letters is None or len(row["question"]) <= letters
            easy = steps is None or 0 < len(task.data["results"]) <= steps  # 0: its solution marks none of them
            if short and easy and (not stated or is_stated(row)):
                found.append(task)
    if not found:
        raise TaskError(f"none of the problems in {data} is so easy ({steps=}, {letters=}, {stated=}): allow more")
    return found


def problem(row: Row) -> dict[str, Any]:
    """What a task has of a row.

    >>> problem({"question": "How much?", "answer": "Half: 48/2=<<48/2=24>>24.\\n48+24=<<48+24=72>>72\\n#### 1,072"})
    {'question': 'How much?', 'results': ['24', '72'], 'answer': '1072'}
    """
    solution, _, answer = row["answer"].rpartition("####")
    results = [plain(result) for _, result in MARKED.findall(solution)]
    return {"question": row["question"], "results": results, "answer": plain(answer)}


def is_stated(row: Row) -> bool:
    """Whether every calculation is of two numbers that stand in the question or were calculated before, and the last
    one gives the answer. Not so where numbers are said in words ("twice"), or have to be known ("a week").

    >>> is_stated({"question": "How many hours are 2 shifts of 6?", "answer": "<<2*6=12>>12 hours\\n#### 12"})
    True
    >>> is_stated({"question": "How many hours are 2 days?", "answer": "2*24=<<2*24=48>>48 hours\\n#### 48"})
    False
    """
    known, given = set(numbers(row["question"])), None
    for expression, result in MARKED.findall(row["answer"]):
        needed, given = numbers(expression), numbers(result)
        if len(needed) != 2 or not known.issuperset(needed):
            return False
        known.update(given)
    return given == numbers(problem(row)["answer"])


def numbers(text: str) -> list[Fraction]:
    """
    >>> numbers("$1,200 is .5 of it")
    [Fraction(1200, 1), Fraction(1, 2)]
    """
    return [Fraction(found) for found in re.findall(r"\d*\.?\d+", plain(text))]


def plain(number: str) -> str:
    return number.replace(",", "").strip()


def rows(data: str) -> dict[str, list[Row]]:
    """The rows of both splits."""
    if data == "made":
        return {split: list(made(split)) for split in SPLITS}
    try:
        found = load(data, **({"name": "main"} if data == "openai/gsm8k" else {}))
    except TaskError as error:
        raise TaskError(
            f"{error}; give --data PATH, a folder with GSM8K's train.jsonl and test.jsonl, or --data made for problems "
            "that need no download"
        ) from None
    return {split: [task.data for task in found if task.split == split] for split in SPLITS}


def made(split: str) -> Iterable[Row]:
    """The demo's questions, which strop/nano understands, in GSM8K's shape."""
    for task in demo.tasks():
        if task.split == split:
            (call,), answer = task.data["calls"], task.data["answer"]
            calculation = call.replace(" ", "")
            solution = f"{calculation} = <<{calculation}={answer}>>{answer}\n#### {answer}"
            yield {"question": task.data["question"], "answer": solution}
