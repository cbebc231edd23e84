"""`strop doctor` before a run: does the memory suffice, and would its groups teach anything?"""

import json
import subprocess
from pathlib import Path

import pytest

from strop.config import Config, MonitorConfig
from strop.probe import Probe, judged, settings
from strop.types import Reward, Rollout, Task
from tests import runs
from tests.e2e.test_bad_input import AGENTS, TASKS


def rollouts(*groups: list[float]) -> list[Rollout]:
    return [
        Rollout(
            id=f"g{n}.{m}",
            group=f"g{n}",
            member=m,
            task=Task(id="t"),
            created=0.0,
            rewards=(Reward(name="reward", value=value),),
        )
        for n, group in enumerate(groups)
        for m, value in enumerate(group)
    ]


@pytest.mark.parametrize(
    ("groups", "flat", "said"),
    [
        (([0.0, 1.0], [1.0, 0.0]), 0, "2 of 2 groups have rewards that differ"),
        (([0.0, 1.0], [1.0, 1.0]), 1, "loop.groups_most"),
        (([0.0, 0.0], [0.0, 0.0]), 2, "easier tasks"),
        (([1.0, 1.0], [1.0, 1.0]), 2, "harder tasks"),
        (([1.0, 1.0], [0.0, 0.0]), 2, "policy.train.temperature"),
    ],
)
def test_groups_are_judged_as_the_algorithm_would(groups, flat, said):
    found = judged(rollouts(*groups), {"reward": 1.0}, 0.1)
    assert (found.groups, found.members, found.flat) == (2, 2, flat)
    assert said in found.verdict


def test_only_rewards_that_count_make_a_difference():
    assert judged(rollouts([0.0, 1.0]), {"reward": 0.0}, 0.1).flat == 1


def test_nobody_is_told_of_a_probe(tmp_path: Path):
    config = Config(monitor=MonitorConfig(writers=("wandb", "mlflow")))
    assert settings(config, 4, tmp_path).monitor.writers == ()


def doctor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(runs.strop("doctor", *arguments), capture_output=True, text=True, timeout=200, check=False)


def test_the_demo_has_something_to_learn(tmp_path: Path):
    settings = ["policy.context=192", "policy.train.max_tokens=48", "runner.workers=8"]
    options = [f"--set={s}" for s in settings]
    done = doctor("strop.demo:agent", "--tasks", "strop.demo:tasks", "--model", "strop/nano", *options, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = Probe(**told["probe"])
    assert (found.groups, found.members, found.lowest, found.highest) == (4, 8, 0.0, 1.0)
    assert found.flat < 4
    assert "GiB" in told["environment"]["memory"]


def test_a_reward_that_never_differs_is_told_before_a_run_begins(tmp_path: Path):
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    options = [f"--set={s}" for s in ("loop.members=2", "runner.workers=2", "policy.context=64")]
    done = doctor(f"{tmp_path}/agents.py:fine", "--tasks", tmp_path / "tasks.jsonl", "--probe", "2", *options)
    assert done.returncode == 0, done.stderr
    assert "every rollout got 1, so nothing would be learnt" in " ".join(done.stdout.split())
    assert not list(tmp_path.glob("run*"))
