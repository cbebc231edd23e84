"""The recipe langgraph-react: questions as tasks, the tool, and three steps of a stock agent."""

import importlib
import json
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from recipes.prepare import python_of
from strop import config, demo
from strop.errors import TaskError
from tests.recipes.trained import ROOT, needs, train

data = importlib.import_module("recipes.langgraph-react.data")
GSM8K = Path(__file__).parents[2] / "../shared/data/math/gsm8k"


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_configs_are_whole(size: str) -> None:
    found = config.load(toml=ROOT / "recipes" / "langgraph-react" / f"{size}.toml")
    assert (ROOT / found.agent.partition(":")[0]).is_file()
    assert found.runner.python == ".recipes/langgraph-react/bin/python"


def test_made_questions_are_the_demos() -> None:
    tasks = data.tasks("made")
    assert Counter(task.split for task in tasks) == {"train": 2000, "test": 128, "long": 64}
    (asked,) = tasks[0].data["messages"]
    assert asked["role"] == "user"
    assert str(tasks[0].data["answer"]) not in asked["content"]
    assert len(tasks[0].data["calls"]) == 1


def test_examples_come_before_the_question() -> None:
    *before, asked = data.tasks("made", examples=True)[0].data["messages"]
    assert [message["role"] for message in before] == ["user", "assistant", "tool", "assistant"] * 3
    assert [asked] == data.tasks("made")[0].data["messages"]
    for call, (_, expression, result) in zip(before[1::4], data.EXAMPLES, strict=True):
        assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"expression": expression}
        assert demo.calculator(expression) == result


def test_rows_of_gsm8k(tmp_path: Path) -> None:
    row = '{"question": "A pen costs $600, two?", "answer": "2*600=<<2*600=1200>>1,200\\n#### 1,200"}\n'
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(row)
    one, other = data.tasks(str(tmp_path))
    assert {one.split, other.split} == {"train", "test"}
    assert one.data == {
        "messages": [{"role": "user", "content": "A pen costs $600, two?"}],
        "answer": "1200",
    }
    (tmp_path / "test.jsonl").write_text('{"question": "How many?", "answer": "no idea"}\n')
    with pytest.raises(TaskError, match="after ####"):
        data.tasks(str(tmp_path))
    with pytest.raises(TaskError, match="--data PATH"):
        data.tasks(str(tmp_path / "elsewhere.jsonl"))


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here")
def test_gsm8k_itself() -> None:
    assert Counter(task.split for task in data.tasks(str(GSM8K))) == {"train": 7473, "test": 1319}


TOOL = """
from agent import calculator
for expression in ("37 * 52", "7 / 2", "-3 - 4", "10 / 0", "2 ** 9", "1.5 + 2.5", "12345.67 + 0", "-2 / 3",
                   "1234567.5 * 1"):
    print(calculator.invoke({"expression": expression}))
"""


@needs("langgraph-react")
@pytest.mark.frameworks
def test_the_tool() -> None:
    python, folder = python_of("langgraph-react"), ROOT / "recipes" / "langgraph-react"
    said = subprocess.run([python, "-c", TOOL], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "1924",
        "3.5",
        "-7",
        "error: nothing can be divided by 0",
        "error: give one operation on two integers, like 12 + 34",
        "4",
        "12345.67",
        "-0.666667",
        "1234567.5",
    ]


@needs("langgraph-react")
@pytest.mark.frameworks
def test_three_steps_of_a_stock_agent(tmp_path: Path) -> None:
    sets = ("loop.steps=3", "loop.groups=6", "loop.group_size=4", "loop.eval_splits=[]", "runner.workers=4")
    trained = train("langgraph-react", tmp_path, *sets)
    assert len(trained.rollouts) == 72
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    assert set(trained.check()) == {None}  # LangGraph sends the conversation back as it was: nothing branches
    called = [rollout for rollout in trained.rollouts if rollout.reward("call")]
    assert called, "the model never used its tool"
    for rollout in trained.rollouts:
        turns, words = trained.turns(rollout), [text for _, text in trained.loss_text(rollout.id)]
        assert (len(turns) > 1) == bool(rollout.reward("call"))
        assert [turn.parent for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
        assert words == [trained.renderer.decode(turn.response_ids) for turn in turns]
        for turn, after in pairwise(turns):  # the tool's result is in the prompt, without loss
            shown = trained.renderer.decode(after.prompt_ids[len(turn.ids) :])
            assert "<|im_start|>tool\n" in shown
        assert {reward.name for reward in rollout.rewards} == {"reward", "right_call", "call"}
        assert {(reward.turn, reward.agent) for reward in rollout.rewards} == {(None, None)}
