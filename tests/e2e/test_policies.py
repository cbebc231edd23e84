"""Two policies in one run: each has its model, its learner and its engine, and learns from its own agent's turns."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tests import runs
from tests.runs import SMALL, Story

TWO = [
    *SMALL,
    *("loop.steps=3", "loop.groups=3", "loop.group_size=4", "loop.checkpoint_every=2", "loop.eval_splits=[]"),
    f"agent={Path(__file__).parents[1] / 'two_agents.py'}:agent",
    *("policies.writer.learner.optim.lr=0.0003", "policies.critic.agents=['crit*']"),
    *("policies.critic.learner.optim.lr=0.001", "policies.critic.algorithm.name=rloo"),
]
NAMES = ("writer", "critic")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("two") / "run"
    runs.finish(runs.demo(folder, *TWO), timeout=900)
    return folder


@pytest.fixture(scope="module")
def told(two: Path) -> Story:
    return runs.story(two)


def weights(folder: Path, step: str = "step-000003-1") -> dict[str, str]:
    parts = {name: folder / "checkpoints" / step / name / "model.safetensors" for name in NAMES}
    return {name: hashlib.sha256(part.read_bytes()).hexdigest() for name, part in parts.items()}


def test_every_step_has_one_version_and_a_checkpoint_with_a_part_for_each(two: Path, told: Story) -> None:
    assert [step.version for step in told.steps] == ["1.1", "1.2", "1.3"]
    assert [step.checkpoint for step in told.steps] == [None, "step-000002-1", "step-000003-1"]
    before, after = weights(two, "step-000002-1"), weights(two)
    assert len({*before.values(), *after.values()}) == 4  # both changed, and they are not each other's
    assert json.loads((two / "checkpoints/best/writer/strop.json").read_text())["version"].startswith("1.")
    assert {path.name for path in (two / "policies").iterdir()} == set(NAMES)


def test_an_agent_is_answered_by_its_policy(told: Story) -> None:
    turns = [turn for turns in told.turns.values() for turn in turns]
    assert {(turn.agent, turn.policy) for turn in turns} == {(name, name) for name in NAMES}
    assert {version for turn in turns for _, version in turn.versions} == {"1.0", "1.1", "1.2"}


def test_each_learns_from_its_own_turns_alone(told: Story) -> None:
    """The learner found every token of its own policy, and no other, as likely as the engine had said."""
    for step in told.steps:
        turns = [turn for id in step.rollouts for turn in told.turns[id]]
        for name in NAMES:
            sampled = sum(len(turn.response_ids) for turn in turns if turn.policy == name)
            assert step.metrics[f"policies/{name}/training/rollout_logprobs_checked"] == sampled
            assert step.metrics[f"policies/{name}/training/rollout_logprobs_diff_max"] < 1e-4
            assert f"policies/{name}/actor/grad_norm" in step.metrics
        assert "actor/grad_norm" not in step.metrics
        assert step.metrics["training/rollout_logprobs_checked"] == sum(len(turn.response_ids) for turn in turns)
        assert "critic/rewards/mean" in step.metrics


# -- the commands that look at a run, or begin with what it left -------------------------------------------------------


def refuse(*arguments: str | Path) -> str:
    """What a command says that is refused."""
    done = subprocess.run(
        runs.strop(*arguments), capture_output=True, text=True, timeout=120, check=False, input="hello\n"
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Fix: " in done.stderr
    return done.stderr


def models_of(folder: Path) -> dict[str, str]:
    tables = json.loads((folder / "config.json").read_text())["policies"]
    return {name: tables[name]["model"] for name in NAMES}


@pytest.mark.slow
def test_an_evaluation_has_every_policys_weights(two: Path, tmp_path: Path) -> None:
    """Those of the run, against those of a checkpoint by its folder."""
    before = two / "checkpoints" / "step-000002-1"
    options = ("--split", "test", "--compare", before, "--folder", tmp_path / "eval", "--json")
    told = json.loads(runs.finish(runs.strop("eval", two, *options)).stdout)
    assert [one["weights"] for one in told["evaluations"]] == [str(before.with_name("step-000003-1")), str(before)]
    assert len(told["comparisons"]) == 1
    for number, checkpoint in (("1", before.with_name("step-000003-1")), ("2", before)):
        models = models_of(tmp_path / "eval" / f"{number}-trained")
        assert models == {name: str(checkpoint / name) for name in NAMES}
    turns = runs.story(tmp_path / "eval" / "1-trained").turns.values()
    assert {(turn.agent, turn.policy) for some in turns for turn in some} == {(name, name) for name in NAMES}
    assert "is one model" in refuse("eval", two, "--split", "test", "--model", "smollm2-135m")


@pytest.mark.slow
def test_a_new_run_begins_from_every_policys_weights(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    options = ("--folder", folder, "--json", "--set=loop.steps=1", "--set=policies.critic.learner.lora.rank=2")
    runs.finish(runs.strop("train", "--from", f"{two}:2", *options))
    assert models_of(folder) == {name: str(folder / "start" / name) for name in NAMES}
    begun = {name: folder / "start" / name / "model.safetensors" for name in NAMES}
    assert {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in begun.items()} == weights(
        two, "step-000002-1"
    )
    files = {name: folder / "checkpoints" / "step-000001-1" / name for name in NAMES}
    assert (files["critic"] / "adapter_model.safetensors").is_file()  # of one an adapter is trained,
    assert (files["writer"] / "model.safetensors").is_file()  # of the other all weights
    for name in NAMES:
        runs.finish(runs.strop("export", folder, tmp_path / name, "--policy", name))
        assert (tmp_path / name / "model.safetensors").is_file()
    options = ("--split", "test", "--folder", tmp_path / "eval", "--json", "--compare", "start")
    told = json.loads(runs.finish(runs.strop("eval", folder, *options)).stdout)
    assert told["evaluations"][0]["model"] == str(folder)


def test_one_policys_model_is_exported(two: Path, tmp_path: Path) -> None:
    assert "has a part for each of several policies (critic, writer)" in refuse("export", two, tmp_path / "model")
    assert "none of them is 'judge'" in refuse("export", two, tmp_path / "model", "--policy", "judge")
    runs.finish(runs.strop("export", two, tmp_path / "model", "--policy", "critic"))
    made = hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert made == weights(two)["critic"]


def chat(said: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        runs.strop("chat", *arguments), capture_output=True, text=True, timeout=200, check=False, input=said
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_policy_is_talked_to_or_the_agent_with_all(two: Path, tmp_path: Path) -> None:
    assert "--policy critic" in refuse("chat", two)
    assert "leave it out" in refuse("chat", two, "--agent", "--policy", "critic")
    asked = "Use the calculator: 12 + 30.\n"
    chat(asked, two, "--policy", "critic", "--folder", tmp_path / "one", "--seed", "1")
    (policy,) = {turn.policy for turns in runs.story(tmp_path / "one").turns.values() for turn in turns}
    assert policy == "main"  # the only one that is served
    chat(asked, two, "--agent", "--folder", tmp_path / "both", "--seed", "1")
    turns = runs.story(tmp_path / "both").turns.values()
    assert {(turn.agent, turn.policy) for some in turns for turn in some} == {(name, name) for name in NAMES}


def test_a_step_is_made_again_bit_for_bit(two: Path) -> None:
    made = json.loads(runs.finish(runs.strop("replay", two, "--step", "3", "--json")).stdout)
    assert made["same_weights"] is True
    assert made["differ"] == {}
    assert made["replay"]["base"] == 2


def test_rollouts_are_scored_again(two: Path, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text("def reward(task, answer):\n    return 1.0\n")
    found = json.loads(
        runs.finish(runs.strop("replay", two, "--reward", f"{tmp_path}/again.py:reward", "--json")).stdout
    )
    assert {one["new"] for one in found["scored"]} == {1.0}


def test_lists_say_which_policies_there_are(two: Path, told: Story) -> None:
    (listed,) = map(json.loads, runs.finish(runs.strop("runs", two, "--json")).stdout.splitlines())
    assert listed["model"] == "writer: strop/nano, critic: strop/nano"
    assert listed["algorithm"] == "writer: grpo, critic: rloo"
    shown = runs.finish(runs.strop("rollouts", two, told.steps[-1].rollouts[0])).stdout
    assert "writer" in shown
    assert "critic" in shown
    assert len(runs.finish(runs.strop("rollouts", two, "--json")).stdout.splitlines()) == 36


@pytest.mark.slow
def test_doctor_looks_at_every_policy(two: Path) -> None:
    done = runs.finish(runs.strop("doctor", two, "--probe", "2", "--json"))
    found = json.loads(done.stdout)
    assert set(found["policies"]) == set(NAMES)
    assert {f"memory of {name}" for name in NAMES} <= set(found["environment"])
    assert set(found["probe"]["policies"]) == set(NAMES)
    assert {one["groups"] for one in found["probe"]["policies"].values()} == {2}


# -- other ways of training --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rollouts_lag_behind_both(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lagging = ("engine.deterministic=false", "loop.staleness=1", "loop.steps=4")
    runs.finish(runs.demo(folder, *TWO, *lagging), timeout=900)
    found = runs.story(folder)
    assert len(found.steps) == 4
    stale = [
        step.metrics[f"policies/{name}/training/off_policy/staleness/max"] for step in found.steps for name in NAMES
    ]
    assert set(stale) == {0.0, 1.0}
    for step in found.steps:
        assert step.metrics.get("training/rollout_logprobs_diff_max", 0.0) < 1e-4
        assert not step.metrics["actor/skipped"]


@pytest.mark.fault
def test_a_policy_that_says_nothing_keeps_its_weights(tmp_path: Path) -> None:
    """The other learns, each step is committed, and a run that was killed goes on."""
    folder, alone = tmp_path / "run", Path(__file__).parents[1] / "two_agents.py"
    silent = [*TWO, "loop.steps=3", "loop.checkpoint_every=1", f"agent={alone}:alone", "loop.keep_checkpoints=3"]
    assert runs.kill_when(runs.demo(folder, *silent), runs.during_step(folder, 2, ended=2), limit=600)
    runs.finish(runs.strop("train", "--resume", folder, "--json"), timeout=900)
    found = runs.story(folder)
    assert [step.number for step in found.steps] == [1, 2, 3]
    made = [weights(folder, str(step.checkpoint)) for step in found.steps]
    assert len({one["critic"] for one in made}) == 1
    assert len({one["writer"] for one in made}) == 3
    for step in found.steps:
        assert step.metrics["policies/critic/actor/skipped"] == 1.0
        assert step.metrics["policies/critic/filter/untrained"] == 12.0
        assert step.metrics["policies/writer/actor/skipped"] == step.metrics["actor/skipped"] == 0.0
        assert set(step.dropped.values()) <= {"zero_variance"}
    told = json.loads(runs.finish(runs.strop("replay", folder, "--step", "2", "--json")).stdout)
    assert told["same_weights"] is True


@pytest.mark.slow
def test_an_adapter_of_one_and_all_weights_of_the_other(tmp_path: Path) -> None:
    """Also after a resume with more steps and another learning rate for one of them."""
    folder = tmp_path / "run"
    runs.finish(runs.demo(folder, *TWO, "loop.steps=1", "policies.writer.learner.lora.rank=4"), timeout=900)
    lower = "policies.critic.learner.optim.lr=0.00001"
    runs.finish(runs.strop("train", "--resume", folder, "--steps", "2", "--set", lower, "--json"), timeout=900)
    found = runs.story(folder)
    first, second = (step.metrics["policies/critic/actor/lr"] for step in found.steps)
    assert second <= 0.00001 < first
    assert max(step.metrics["training/rollout_logprobs_diff_max"] for step in found.steps) < 1e-4
    last = folder / "checkpoints" / str(found.steps[-1].checkpoint)
    assert (last / "writer" / "adapter_model.safetensors").is_file()
    assert (last / "critic" / "model.safetensors").is_file()
    chat("hello\n", folder, "--policy", "writer", "--folder", tmp_path / "said")
    again = json.loads(runs.finish(runs.strop("train", "--resume", folder, "--json")).stdout)
    assert again["done"] is True


@pytest.mark.fault
def test_killed_it_goes_on_to_the_same_weights(two: Path, tmp_path: Path) -> None:
    """Killed before its first checkpoint, and again after it."""
    folder = tmp_path / "run"
    assert runs.kill_when(runs.demo(folder, *TWO), runs.during_step(folder, 2, ended=2), limit=600)
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(resume, runs.during_step(folder, 3, ended=2), limit=600)
    runs.finish(resume, timeout=900)
    mine, theirs = runs.story(folder), runs.story(two)
    assert mine.tokens() == theirs.tokens()
    assert [step.digest for step in mine.steps] == [step.digest for step in theirs.steps]
    assert None not in [step.digest for step in mine.steps]
    assert weights(folder, str(mine.steps[-1].checkpoint)) == weights(two)


def test_an_agent_that_no_policy_takes_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lost = [one for one in TWO if not one.startswith("policies.critic")] + ["policies.judge.model=strop/nano"]
    done = subprocess.run(runs.demo(folder, *lost), capture_output=True, text=True, check=False, timeout=280)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert "no policy answers for agent 'critic', only for judge, writer. Fix: put it into policies.NAME.agents" in said
    assert not runs.story(folder).steps
