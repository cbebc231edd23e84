"""The recipe `calc`: an AutoGen assistant with a calculator over MCP."""

import doctest
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipes.calc import calculator, data, reward
from strop.config import load
from strop.errors import TaskError
from strop.types import Task
from tests.recipes.trained import ROOT, needs, train

SHARED = ROOT / "../shared/data"
CALC_X = [
    {
        "id": "ape210k__1",
        "question": "A box has 12 rows of 15 pens. How many pens are in 3 boxes?",
        "chain": '<gadget id="calculator">12 * 15</gadget>\n<output>180</output>\n\n'
        '<gadget id="calculator">180 * 3</gadget>\n<output>540</output>\n\n<result>540</result>',
        "result": "540",
        "source": "calc",
    },
    {"id": "ape210k__2", "question": "What is (3/2) of (4/9)?", "chain": "", "result": "2/3", "source": "calc"},
    {"id": "aqua_rat__3", "question": "How old? A) 24 B) 77", "chain": "", "result": "B", "source": "calc"},
]


@pytest.mark.parametrize("module", [calculator, data, reward])
def test_examples_in_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


# --- data -----------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_made_questions_have_calc_x_s_shape() -> None:
    rows = data.made()
    assert set(rows[0].data) == {"question", "chain", "result"}
    tasks = data.tasks("made")
    assert {task.split for task in tasks} == {"train", "test"}
    assert tasks[0].data == {"question": "What is 404 - 43?", "answer": "361"}


def test_calc_x_rows(tmp_path: Path) -> None:
    tasks = data.tasks(write(tmp_path / "calc.jsonl", CALC_X))
    assert [(task.id, task.data["answer"]) for task in tasks] == [("ape210k__1", "540"), ("ape210k__2", "2/3")]


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"question": "Q?", "answer": "He has <<9*2=18>>18.\n#### 1,018"}, "Q?", 1018),
        ({"Body": "B", "Question": "Q?", "Answer": 145.0, "Equation": "( 290.0 / 2.0 )"}, "B Q?", 145),
        ({"body": "B.", "question": "Q? ", "answer": "9 (apples)", "formula": "7+2=9"}, "B. Q?", 9),
        ({"input": "Q ?", "target": 43.0, "type": "singleeq"}, "Q ?", 43),
        ({"body": "B.", "question": "Q?", "answer": "7:3"}, "B. Q?", None),
        ({"problem": "Q?", "solution": "..."}, "", None),
    ],
)
def test_rows_of_other_sets(row: dict[str, Any], question: str, answer: int | None) -> None:
    assert data.read(row) == (question, answer)


def test_easy_ones_and_their_two_sides(tmp_path: Path) -> None:
    said = "Ann has {} pens and buys {} more. How many?"
    rows = [{"input": said.format(a, b), "target": float(a + b)} for a in range(2, 22) for b in range(2, 22)]
    again = [{"input": f"Bo has {b} cups, {a} break ...", "target": float(b - a)} for a in range(3) for b in range(9)]
    odd = [{"input": "Ann has 7 pens. How many?", "target": 7}, {"input": "1 + 2 + 3?", "target": 6}]
    path = write(tmp_path / "mawps.jsonl", [*rows, *again, *odd, *rows])
    easy = data.tasks(path, single=True)
    assert len(easy) == len(rows) + len(again)
    side: dict[str, str] = {}
    for task in easy:
        key = str(sorted(data.numbers(task.data["question"])))
        assert side.setdefault(key, task.split) == task.split
    assert 20 < sum(task.split == "test" for task in easy) < 100


def test_several_sets_and_their_own_splits(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        write(tmp_path / "gsm8k" / f"{split}.jsonl", [{"question": f"{split}?", "answer": "#### 5"}])
    other = write(tmp_path / "calc.jsonl", CALC_X)
    alone = data.tasks(str(tmp_path / "gsm8k"))
    assert {task.data["question"]: task.split for task in alone} == {"train?": "train", "test?": "test"}
    tasks = data.tasks(f"{tmp_path / 'gsm8k'}, {other}")
    assert [task.id for task in tasks[2:]] == ["1-calc-ape210k__1", "1-calc-ape210k__2"]
    assert len({task.split for task in tasks[:2]}) == 1  # neither has a number: together they are divided by numbers


def test_data_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="--data PATH"):
        data.tasks(str(tmp_path / "none.jsonl"))
    with pytest.raises(TaskError, match="none of the shapes"):
        data.tasks(write(tmp_path / "x.jsonl", [{"problem": "Q?"}]))


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data here")
def test_real_rows() -> None:
    assert len(data.tasks(str(SHARED / "agent_lightning/calc_x_sample.jsonl"))) == 8
    three = ",".join(str(SHARED / f"math/{name}.jsonl") for name in ("mawps", "svamp", "asdiv"))
    easy = data.tasks(three, single=True)
    assert len(easy) > 1500
    assert 0.08 < sum(task.split == "test" for task in easy) / len(easy) < 0.18
    questions = data.tasks(str(SHARED / "math/gsm8k"))
    assert {split: sum(task.split == split for task in questions) for split in ("train", "test")} == {
        "train": 7473,
        "test": 1319,
    }


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_settings(size: str) -> None:
    config = load(toml=ROOT / f"recipes/calc/{size}.toml")
    assert set(config.algorithm.rewards) <= set(
        reward.score(Task(id="t", data={"answer": "1"}), {"answer": "", "computed": []})
    )


# --- the calculator and the reward ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37 * 52", "1924"),
        ("(1 + 2) / 6", "0.5"),
        ("-7 // 2", "-4"),
        ("1,200 × 3 ÷ 8", "450"),
        ("12 x (3 + 4)x2", "168"),
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 0", "error: division by zero"),
        ("9**9**9", "error: powers are whole numbers up to 64"),
        ("10**50 * 10", "error: the numbers are too large"),
        ("1" * 300, "error: the expression is longer than 200 characters"),
        ("x + 1", "error: give numbers and operators, like 12 + 34"),
        ("0x10", "0"),
        ("__import__('os').getcwd()", "error: give numbers and operators, like 12 + 34"),
        ("'a' * 9", "error: give numbers and operators, like 12 + 34"),
        ("True + 1", "error: give numbers and operators, like 12 + 34"),
        ("0x10 + 1e3 + 1_0", "error: give numbers and operators, like 12 + 34"),
        ("1e999999999", "error: give numbers and operators, like 12 + 34"),
        ("12 +", "error: give numbers and operators, like 12 + 34"),
        ("\0", "error: give numbers and operators, like 12 + 34"),
        ("", "error: give numbers and operators, like 12 + 34"),
    ],
)
def test_calculator(expression: str, result: str) -> None:
    said = calculator.calculator({"expression": expression})
    assert said["content"][0]["text"] == result
    assert said["isError"] == result.startswith("error")


def test_calculator_is_a_server_that_outlives_bad_calls() -> None:
    asked = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list"},
        {"id": 3, "method": "tools/call", "params": {"name": "calculator", "arguments": {"expressions": 1}}},
        {"id": 4, "method": "resources/list"},
        {"id": 5, "method": "tools/call", "params": {"name": "calculator", "arguments": {"expression": "6 * 7"}}},
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **one}) + "\n" for one in asked)
    command = [sys.executable, str(ROOT / "recipes/calc/calculator.py")]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["id"] for one in said] == [1, 2, 3, 4, 5]
    assert said[1]["result"]["tools"][0]["name"] == "calculator"
    assert said[2]["result"]["isError"]
    assert said[3]["error"]["code"] == -32601
    assert said[4]["result"]["content"] == [{"type": "text", "text": "42"}]


@pytest.mark.parametrize(
    ("golden", "answer", "computed", "worth"),
    [
        ("17", "12 + 5 = 17.", ["17"], (1, 1, 1)),
        ("17", "The answer is 18.", ["17"], (0, 1, 1)),
        ("17", "", ["16", "17"], (0, 1, 1)),
        ("17", "17", [], (1, 0, 0)),
        ("17", "I do not know", ["16"], (0, 1, 0)),
        ("2/3", "It is 0.67", ["0.666667"], (0, 1, 1)),
        ("2/3", "It is 0.666667.", ["0.666667"], (1, 1, 1)),
        ("1250", "$1,250.00", [], (1, 0, 0)),
    ],
)
def test_worth(golden: str, answer: str, computed: list[str], worth: tuple[int, int, int]) -> None:
    task = Task(id="t", data={"answer": golden})
    said = reward.score(task, {"answer": answer, "computed": computed})
    assert (said["reward"], said["called"], said["computed"]) == worth
    assert said["solved"] == (worth[0] and worth[2])


# --- trained for a few steps ----------------------------------------------------------------------------------------


@pytest.mark.frameworks
@needs("calc")
def test_trains(tmp_path: Path) -> None:
    trained = train(
        "calc",
        tmp_path,
        "loop.steps=3",
        "loop.groups=6",
        "loop.group_size=6",
        "loop.eval_splits=[]",
        "runner.workers=4",
    )
    branches = trained.check()
    assert set(branches) == {None}, "one conversation each, and every turn goes on from the one before"
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    called = 0
    for rollout in trained.rollouts:
        turns = trained.turns(rollout)
        results = [message["content"] for message in turns[-1].messages if message["role"] == "tool"]
        assert len(turns) == 1 + len(results)
        assert [turn.parent for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
        worth = {one.name: one.value for one in rollout.rewards}
        assert all(one.turn is None and one.agent is None for one in rollout.rewards)
        assert set(worth) == {"reward", "called", "computed", "solved"}
        assert worth["called"] == any(not result.startswith("error") for result in results)
        # What carries loss is what the model said, turn by turn: neither the question nor what the calculator wrote.
        said = trained.loss_text(rollout.id)
        assert [text for _, text in said] == [trained.renderer.decode(turn.response_ids) for turn in turns]
        for turn, (_, text) in zip(turns, said, strict=True):
            assert "<|im_start|>" not in text
            assert ("<tool_call>" in text) == (turn.finish == "tool_calls")
        called += bool(results)
    assert called > 10, "the calculator was hardly ever called"
