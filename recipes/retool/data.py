"""Problems whose answer is a number: DAPO-Math-17k to train on, AIME 2024 and 2025 to be measured by.

    tasks("BytedTsinghua-SIA/DAPO-Math-17k")   from the Hugging Face hub, and AIME from there as well
    tasks("dapo-math-17k.parquet")             a file in that shape, which is verl's
    tasks("math/")                             a folder with dapo*.parquet, aime*24.* and aime*25.* (.jsonl or .parquet)
    tasks("made")                              arithmetic in the same shape; nothing is downloaded

    a row of DAPO   {"prompt": [{"role": "user", "content": ...}], "reward_model": {"ground_truth": "34", ...}, ...}
    a row of AIME   {"problem": ..., "answer": 204, ...}, or with capitals
    their tasks     {"messages": [system, (examples,) problem], "answer": "34"}, splits train, aime24 and aime25

The public DAPO file has every problem about a hundred times, each time between the same two sentences on the form of
the answer. Here each is there once, without them. The few problems that come with two different answers are left out.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop import Task, demo
from strop.errors import TaskError
from strop.tasks import files, hub

DAPO = "BytedTsinghua-SIA/DAPO-Math-17k"
AIME = {"aime24": "Maxwell-Jia/AIME_2024", "aime25": "yentinglin/aime_2025"}
SYSTEM = (
    "Solve the problem. You can run Python code, as often as you like, and read what it prints. "
    "Put the answer in \\boxed{} at the end."
)
EXAMPLES = [
    ("What is 12 + 5?", "print(12 + 5)", "17"),
    ("How much is 40 minus 8?", "print(40 - 8)", "32"),
    ("Compute 6 * 30.", "print(6 * 30)", "180"),
]
"""How it goes, for models that hardly call a tool of their own accord: problem, code, what it prints."""
AROUND = re.compile(
    r"\ASolve the following math problem step by step\..*?\n\n|\n\nRemember to put your answer .*\Z", re.S
)

HELD_OUT = 10
Row = dict[str, Any]


def tasks(data: str = DAPO, examples: bool = False) -> list[Task]:
    """Tasks of `data`. With `examples`, every conversation begins with some that went well. Of a single file one
    problem in HELD_OUT is kept aside as `test`."""
    shown = [message for one in EXAMPLES if examples for message in example(*one)]
    before = [{"role": "system", "content": SYSTEM}, *shown]
    found: list[Task] = []
    for split, where in places(data).items():
        for n, (problem, answer) in enumerate(once(rows(where)).items()):
            messages = [*before, {"role": "user", "content": problem}]
            held = "test" if where == data != DAPO and n % HELD_OUT == 0 else split
            found.append(Task(id=f"{split}-{n}", split=held, data={"messages": messages, "answer": answer}))
    return found


def example(problem: str, code: str, printed: str) -> list[dict[str, Any]]:
    call = {"name": "python", "arguments": json.dumps({"code": code})}
    return [
        {"role": "user", "content": problem},
        {"role": "assistant", "content": "", "tool_calls": [{"id": printed, "type": "function", "function": call}]},
        {"role": "tool", "content": printed, "tool_call_id": printed},
        {"role": "assistant", "content": f"The answer is \\boxed{{{printed}}}."},
    ]


def places(data: str) -> dict[str, str]:
    """Where each split comes from."""
    if data == "made":
        return {"train": "made/train", "test": "made/test"}
    if data == DAPO:
        return {"train": DAPO, **AIME}
    if not Path(data).is_dir():
        return {"train": data}
    patterns = {"train": "dapo*.parquet", "aime24": "aime*24.*", "aime25": "aime*25.*"}
    there = {split: sorted(Path(data).rglob(pattern)) for split, pattern in patterns.items()}
    if not there["train"]:
        raise TaskError(f"{data} has no dapo*.parquet: give --data with the folder or the file of {DAPO}")
    return {"train": "", **AIME} | {split: str(found[0]) for split, found in there.items() if found}


def rows(where: str) -> Iterator[Row]:
    """Rows as they stand in a file or on the hub, one at a time: the public file has 1.8 million of them."""
    if where.startswith("made/"):
        yield from made(where.removeprefix("made/"))
        return
    path = Path(where)
    try:
        sources = {"": files.read(path)} if path.suffix or path.exists() else hub.from_hub(where)
        for source in sources.values():
            yield from (row.item for row in source)
    except TaskError as error:
        raise TaskError(f"{error}; a folder with copies of DAPO and AIME is given with --data PATH") from error


def once(found: Iterator[Row]) -> dict[str, str]:
    """Answers by problem, in the order of the file."""
    answers: dict[str, set[str]] = {}
    for row in found:
        problem, answer = read(row)
        answers.setdefault(problem, set()).add(answer)
    return {problem: given.pop() for problem, given in answers.items() if len(given) == 1}


def read(row: Row) -> tuple[str, str]:
    """The problem and its answer.

    >>> read({"prompt": [{"role": "user", "content": "What is $2+2$?"}], "reward_model": {"ground_truth": "4"}})
    ('What is $2+2$?', '4')
    >>> read({"ID": "2024-I-4", "Problem": "Jen enters ...", "Answer": 116})
    ('Jen enters ...', '116')
    """
    match {key.lower(): value for key, value in row.items()}:
        case {"prompt": [*_, {"content": problem}], "reward_model": {"ground_truth": answer}}:
            return AROUND.sub("", problem).strip(), str(answer)
        case {"problem": problem, "answer": answer}:
            return problem.strip(), str(answer)
    raise TaskError(
        f"a row with {', '.join(row)} is neither DAPO's nor AIME's: recipes/retool/data.py has their shapes"
    )


def made(split: str) -> Iterator[Row]:
    """Arithmetic as rows of DAPO. Test problems have other operands than those that are trained on."""
    rng = random.Random(split)
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100) if demo.held_out(a, b) == (split == "test")]
    for index, (a, b) in enumerate(rng.sample(pairs, {"train": 2000, "test": 32}[split])):
        expression = f"{a} {rng.choice('+-*')} {b}"
        yield {
            "data_source": "made",
            "prompt": [{"role": "user", "content": f"What is {expression}?"}],
            "ability": "math",
            "reward_model": {"ground_truth": demo.calculator(expression), "style": "rule"},
            "extra_info": {"index": index, "split": split},
        }
