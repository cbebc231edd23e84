"""A reward is added in one file: to a copy of the package as a contributor would, and beside it as a user would."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strop
from tests.contributing.test_dialect import touched

SRC = Path(strop.__file__).parent

REWARD = '''
"""Whether the brackets of an answer are balanced."""


def balanced(task, answer):
    """
    >>> balanced(None, "f(x) = (x + 1)"), balanced(None, ")(")
    (1.0, 0.0)
    """
    depth = 0
    for letter in answer:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth < 0:
            return 0.0
    return float(depth == 0)
'''
AGENT = """
def agent(task, llm):
    messages = [{"role": "user", "content": task.data["question"]}]
    return llm.client().chat.completions.create(model=llm.model, messages=messages).choices[0].message.content
"""
PROGRAM = """
import sys

from strop import testing

for answer in ("f(x)", "f(x"):
    trial = testing.run(sys.argv[1], {"question": "Write a call of f."}, answers=[answer], reward=sys.argv[2])
    print(trial.reward())
"""


@pytest.mark.parametrize("whose", ["ours", "the user's"])
def test_a_reward_is_a_file(tmp_path: Path, whose: str) -> None:
    copy = tmp_path / "src" / "strop"
    shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "agent.py").write_text(AGENT)
    file = copy / "rewards" / "brackets.py" if whose == "ours" else tmp_path / "brackets.py"
    file.write_text(REWARD)
    assert list(touched(SRC, copy)) == (["rewards/brackets.py"] if whose == "ours" else [])

    name = "strop.rewards.brackets:balanced" if whose == "ours" else "brackets.py:balanced"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "agent.py:agent", name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(copy.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split() == ["1.0", "0.0"], done.stderr
