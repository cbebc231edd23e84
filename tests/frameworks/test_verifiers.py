"""Environments of the real verifiers, of 0.1 and 0.4: three steps with the model in the box, from the command line."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from strop.types import Rollout, Turn
from tests.frameworks import environments
from tests.runs import Story, finish, story, strop

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / "tests" / "frameworks" / "agents" / "verifiers"
GAP = 1e-4
TRAINED = ("main", "assistant")


@pytest.fixture
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment: str = request.param
    if not environments.ready(environment):
        pytest.skip(f"{environment} is not installed: run `make frameworks`")
    program = environments.program(environment)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(THEIRS)]))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")  # uv, for harnesses
    return program


old = pytest.mark.parametrize("python", ["verifiers-0.1"], indirect=True)
new = pytest.mark.parametrize("python", ["verifiers-0.4"], indirect=True)


def train(python: Path, folder: Path, environment: str, args: dict[str, Any], **settings: Any) -> Story:
    given = {
        "agent": "strop.compat.verifiers:agent",
        "tasks": "strop.compat.verifiers:tasks",
        "tasks_args": {"environment": environment, "args": args, "python": str(python)},
        "policy": {"model": "strop/nano", "train": {"max_tokens": 64}} | settings.pop("policy", {}),
        "loop": {"steps": 3, "groups": 2, "group_size": 2, "eval_splits": []},
        "runner": {"workers": 2, "python": str(python)},
    }
    (config := folder.with_suffix(".toml")).write_text("\n".join(_toml(given)))
    finish(strop("train", "--config", config, "--folder", folder), timeout=1200)
    told = story(folder)
    assert {(one.status, one.detail) for one in told.rollouts} == {("succeeded", None)}
    assert (len(told.rollouts), len(told.steps)) == (12, 3)
    for step in told.steps:
        assert step.metrics["training/rollout_logprobs_diff_max"] < GAP
        assert step.metrics["training/rollout_logprobs_checked"] == sum(
            len(turn.response_ids) for id in step.rollouts for turn in told.turns[id] if turn.agent in TRAINED
        )
    return told


def _toml(table: dict[str, Any], name: str = "") -> list[str]:
    """Tables in full, with JSON for what is in them, which TOML reads alike."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    inner = [(f"{name}.{key}" if name else key, value) for key, value in table.items() if isinstance(value, dict)]
    return [*([f"[{name}]"] if name else []), *plain, *(line for at, value in inner for line in _toml(value, at))]


def check_appends(turns: list[Turn]) -> None:
    for before, after in itertools.pairwise(turns):
        assert (after.parent, after.branch, after.shared) == (before.id, None, len(before.ids))


def rewards(rollout: Rollout) -> dict[str, float]:
    assert all(one.turn is None and one.agent is None for one in rollout.rewards)
    return {one.name: one.value for one in rollout.rewards}


# -- 0.1 ---------------------------------------------------------------------------------------------------------------


@old
@pytest.mark.parametrize("kind", ["single", "several", "tools", "state", "group"])
def test_environments_of_0_1(python: Path, tmp_path: Path, kind: str) -> None:
    told = train(python, tmp_path / "run", "sums", {"kind": kind})
    for rollout in told.rollouts:
        turns, given = told.turns[rollout.id], rewards(rollout)
        check_appends(turns)
        assert given["reward"] == pytest.approx(given["right"] + 0.001 * given["length"])
        assert rollout.reward() == given["reward"], "what the rubric's functions gave must not count again"
        assert given["num_turns"] == len(turns)
        if kind == "several":
            assert len(turns) == 3
        if kind in ("tools", "state"):
            assert "calculator" in json.dumps(turns[0].requested["tools"])
            calls = [call for turn in turns for call in turn.answer.get("tool_calls") or ()]
            assert given["calculator_calls"] == len(calls)
            assert '"uses"' not in json.dumps(turns[0].requested["tools"])
    if kind in ("tools", "state"):
        assert any(len(turns) > 1 for turns in told.turns.values()), "no tool was called, so nothing was tried"
    if kind == "group":
        routes = {rollout.task.data["row"]["info"]["env_id"] for rollout in told.rollouts}
        assert routes == {"single", "tools"}
        for rollout in told.rollouts:
            has_tools = bool(told.turns[rollout.id][0].requested.get("tools"))
            assert has_tools == (rollout.task.data["row"]["info"]["env_id"] == "tools")


@old
def test_rows_of_evaluation_are_tasks_of_test(python: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    finish([str(python), "-m", "strop.compat.verifiers", "sums", str(out), "--limit", "2"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train", "train", "test"]
    assert rows[0]["data"]["row"]["prompt"][-1] == {"role": "user", "content": "Use the calculator: 12 * 45."}


@old
@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("sums", {"kind": "compared"}, "compares rollouts with each other (shortest)"),
        ("sums", {"kind": "none"}, "there is no kind none"),
        ("nothing-here", {}, "there is no environment 'nothing-here'"),
    ],
)
def test_what_cannot_run_is_refused(python: Path, tmp_path: Path, name: str, args: Any, why: str) -> None:
    import subprocess

    out = tmp_path / "tasks.jsonl"
    command = [str(python), "-m", "strop.compat.verifiers", name, str(out), "--args", json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert why in done.stderr.splitlines()[-1]
    assert not out.exists()


# -- 0.4 ---------------------------------------------------------------------------------------------------------------


@new
@pytest.mark.parametrize("calculator", [False, True], ids=["plain", "tool server"])
def test_tasksets_of_0_4(python: Path, tmp_path: Path, calculator: bool) -> None:
    args = {"taskset": {"task": {"calculator": calculator}}}
    told = train(python, tmp_path / "run", "products", args)
    for rollout in told.rollouts:
        turns, given = told.turns[rollout.id], rewards(rollout)
        check_appends(turns)
        assert given["reward"] == pytest.approx(2 * given["right"] + 0.001 * given["reward_function"])
        assert rollout.reward() == given["reward"]
        assert given["turns"] == len(turns)
        assert bool(turns[0].requested.get("tools")) == calculator
    if calculator:
        assert any(len(turns) > 1 for turns in told.turns.values()), "no tool was called, so nothing was tried"


@new
def test_seats_are_agents(python: Path, tmp_path: Path) -> None:
    """verifiers' own simulated user over a taskset: two seats, of which one is trained and rewarded."""
    args = {"id": "user-sim", "user": {"max_turns": 2}}
    told = train(python, tmp_path / "run", "products", args, policy={"agents": ["assistant"]})
    for rollout in told.rollouts:
        assert {turn.agent for turn in told.turns[rollout.id]} == {"user", "assistant"}
        assert {one.agent for one in rollout.rewards} == {"assistant"}


@new
def test_a_harness_that_runs_commands_is_told_where(python: Path, tmp_path: Path) -> None:
    import subprocess

    args = json.dumps({"agent": {"harness": {"id": "bash"}}})
    command = [str(python), "-m", "strop.compat.verifiers", "products", str(tmp_path / "tasks.jsonl"), "--args", args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("the harness bash runs what the model writes. Fix: say where")
