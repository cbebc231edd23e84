"""`strop doctor` before a run: does the memory suffice, and would its groups teach anything?"""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from strop.algorithms import make
from strop.config import AlgorithmConfig, Config, LearnerConfig, LoopConfig, MonitorConfig
from strop.errors import ConfigError
from strop.monitor.console import Silent
from strop.run.preflight import PreflightResult, configure_probe, judge_batch, probe
from strop.run.prepare import refuse_contradictions
from strop.trajectory import Sample, assemble
from tests import runs
from tests.e2e.test_bad_input import AGENTS, TASKS, sentence
from tests.unit.algorithms.rollouts import sample, turn


def judge(*samples: Sample, name="grpo", rewards=None, agents=("main",), budget=1000, **more) -> PreflightResult:
    config = AlgorithmConfig(name=name, settings=more, rewards=rewards or {"reward": 1.0})
    made = assemble(samples, agents=agents, budget=budget)
    return judge_batch(made, make(config, LearnerConfig()), config.rewards, 0.1)


def groups(*totals: list[float]) -> list[Sample]:
    return [sample(m, got, turn(), group=f"g{n}") for n, group in enumerate(totals) for m, got in enumerate(group)]


@pytest.mark.parametrize(
    ("got", "flat", "said"),
    [
        (([0.0, 1.0], [1.0, 0.0]), 0, "2 of 2 groups would teach something"),
        (([0.0, 1.0], [1.0, 1.0]), 1, "loop.max_groups"),
        (([0.0, 0.0], [0.0, 0.0]), 2, "easier tasks"),
        (([1.0, 1.0], [1.0, 1.0]), 2, "harder tasks"),
        (([1.0, 1.0], [0.0, 0.0]), 2, "policy.train.temperature"),
    ],
)
def test_groups_are_judge_batch_as_the_algorithm_would(got, flat, said):
    for name in ("grpo", "rloo", "gigpo"):
        found = judge(*groups(*got), name=name)
        assert (found.groups, found.members, found.flat) == (2, 2, flat)
        assert said in found.verdict


def test_the_shipped_model_knows_one_tool():
    found = judge(*groups([0.0, 0.0], [0.0, 0.0]))
    assert "knows one tool only" not in found.verdict
    assert "strop/nano knows one tool only" in replace(found, model="strop/nano").verdict


def test_only_rewards_that_count_make_a_difference():
    assert judge(*groups([0.0, 1.0]), rewards={"reward": 0.0}).flat == 1


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_without_groups_only_the_rewards_are_told(name):
    """Tasks that differ teach them something, and so do groups of one."""
    for got in ([1.0, 1.0], [0.0, 0.0]), ([1.0], [0.0]):
        found = judge(*groups(*got), name=name)
        assert found.flat is None
        assert found.verdict == "rollouts got 0 to 1; this algorithm does not compare them within groups"
    assert "every rollout got 1;" in judge(*groups([1.0, 1.0]), name=name).verdict
    assert judge(*groups([1.0, 1.0]), name="reinforce_pp", baseline=True).flat == 1


def test_groups_of_one_are_told_what_they_lack():
    found = judge(*groups([1.0], [0.0]))
    assert found.flat == 2
    assert "nobody to compare with (loop.group_size), so nothing would be learnt" in found.verdict


def test_agents_that_are_not_trained_are_named():
    found = judge(*groups([0.0, 1.0]), agents=("nobody",))
    assert found.flat == 1
    assert "policy.agents" in found.verdict


def test_rewards_of_turns_and_agents_count():
    first, second = (sample(m, None, turn(), turn(), rewards=[(float(m), 1), (2.0, "main")]) for m in (0, 1))
    found = judge(first, second)
    assert (found.flat, found.lowest, found.highest, found.mean) == (0, 2.0, 3.0, 2.5)
    assert judge(first).verdict.startswith("0 of 1")


def test_what_training_leaves_out_makes_no_difference():
    """An engine that failed says nothing of the agent; an agent that failed earned nothing."""
    good = [sample(m, 1.0, turn()) for m in (0, 1)]
    lost = sample(2, None, turn(), status="failed", cause="engine_error")
    found = judge(*good, lost)
    assert (found.flat, found.lowest, found.mean, found.failed) == (1, 1.0, 1.0, {"engine_error": 1})
    failed = sample(2, None, turn(), status="failed", cause="agent_error")
    assert (judge(*good, failed).flat, judge(*good, failed).lowest) == (0, 0.0)
    long = judge(*groups([0.0, 1.0]), budget=2)
    assert (long.flat, long.left) == (1, {"over_budget": 2})
    assert "learner.token_budget" in long.verdict


def test_a_penalty_for_leaving_the_reference_is_nothing_yet():
    assert judge(*groups([0.0, 1.0], [1.0, 1.0]), kl="reward").flat == 1


@pytest.mark.parametrize("more", [{"kl": "loss"}, {"entropy_coef": 0.1}])
def test_groups_that_only_carry_kl_or_entropy_teach_nothing(more):
    assert judge(*groups([0.0, 1.0], [1.0, 1.0]), **more).flat == 1
    found = judge(*groups([1.0, 1.0], [1.0, 1.0]), **more)
    assert (found.flat, found.left) == (2, {"zero_variance": 4})
    assert "harder tasks" in found.verdict


def test_nobody_is_told_of_a_probe(tmp_path: Path):
    config = Config(monitor=MonitorConfig(writers=("wandb", "mlflow")))
    assert configure_probe(config, 4, tmp_path).monitor.writers == ()


def test_a_probe_may_have_more_groups_than_a_step(tmp_path: Path):
    config = Config(loop=LoopConfig(groups=2, max_groups=3))
    probing = configure_probe(config, 4, tmp_path)
    refuse_contradictions(probing, make(probing.algorithm, probing.learner))
    wrong = Config(loop=LoopConfig(groups=2, max_groups=1))
    with pytest.raises(ConfigError, match="max_groups is 1, less than"):
        asyncio.run(probe(wrong, Silent(), groups=1))


def doctor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(runs.strop("doctor", *arguments), capture_output=True, text=True, timeout=200, check=False)


def test_the_demo_has_something_to_learn(tmp_path: Path):
    settings = ["policy.context=192", "policy.train.max_tokens=48", "runner.workers=8"]
    options = [f"--set={s}" for s in settings]
    done = doctor("strop.demo:agent", "--tasks", "strop.demo:tasks", "--model", "strop/nano", *options, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = PreflightResult(**told["probe"])
    assert (found.groups, found.members, found.lowest, found.highest) == (4, 8, 0.0, 1.0)
    assert found.flat < 4
    assert "GiB" in told["environment"]["memory"]


@pytest.mark.slow
def test_a_reward_that_never_differs_is_told_before_a_run_begins(tmp_path: Path):
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    options = [f"--set={s}" for s in ("loop.group_size=2", "runner.workers=2", "policy.context=64")]
    done = doctor(f"{tmp_path}/agents.py:fine", "--tasks", tmp_path / "tasks.jsonl", "--probe", "2", *options)
    assert done.returncode == 0, done.stderr
    assert "every rollout got 1, so nothing would be learnt" in " ".join(done.stdout.split())
    assert not list(tmp_path.glob("run*"))


def test_an_agent_that_fails_is_told_with_what_it_said(tmp_path: Path):
    """The folder that a run's sentence leads to is gone, and there is nothing to resume."""
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    options = [f"--set={s}" for s in ("loop.group_size=2", "runner.workers=2", "policy.context=64")]
    said = sentence(
        doctor(f"{tmp_path}/agents.py:raises", "--tasks", tmp_path / "tasks.jsonl", "--probe", "1", *options), 2
    )
    assert "all 2 rollouts failed while probing, 2 with agent_error: RuntimeError: the kitchen is closed" in said
    assert said.endswith("Fix: correct the agent, then ask again")
    assert "strop rollouts" not in said
