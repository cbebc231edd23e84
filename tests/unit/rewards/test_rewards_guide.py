"""The guide as written, and how light it is to import what it shows."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strop import rewards
from strop.config import load
from strop.run.group_reward import load as load_relative
from strop.types import Task
from tests.unit.rewards.judging import endpoint

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guides" / "rewards.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TASK = Task(id="t", data={"question": "Where?", "answer": "1/2"})


def test_its_code_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "k")
    names: dict[str, Any] = {}
    with endpoint(lambda prompt: "A" if prompt.rfind("better") > prompt.rfind("worse") else "yes") as place:
        for block in BLOCKS:
            exec(block.replace("https://api.openai.com/v1", place.url), names)
            if "has_format(answer" in block:
                given = names["score"](TASK, r"<think>so</think><answer>\boxed{0.5}</answer>")
                assert given == {"reward": True, "format": True, "length": 0.0}
        assert [float(names["score"](TASK, answer)) for answer in ("1/2", "", "a half")] == [1.0, 0.0, 1.0]
        assert len(place.asked) == 1
        place.say = lambda prompt: "A" if prompt.index("good") < prompt.index("bad") else "B"
        given = names["best"](TASK, ["good", "bad"])
        assert [float(one["win"]) for one in given] == [1.0, 0.0]
    assert len(BLOCKS) == 5


def test_its_command_names_settings_that_exist(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(BLOCKS[-1])
    sets = re.findall(r"--set (\S+)", PAGE)
    made = load(sets=[one.replace("rewards.py", str(tmp_path / "rewards.py")) for one in sets])
    assert made.algorithm.rewards == {"win": 1}
    assert load_relative(made.group_reward) is not None


def test_it_names_everything_there_is_and_links_to_what_exists() -> None:
    for name in rewards.__all__:
        assert name in PAGE, name
    for place in re.findall(r"\]\(([^)#h][^)#]*)", PAGE):
        assert (ROOT / "docs" / "guides" / place).exists(), place


def test_importing_rewards_is_light() -> None:
    heavy = "{'torch', 'math_verify', 'sympy', 'openai', 'numpy'}"
    code = f"import sys, strop.rewards; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)
