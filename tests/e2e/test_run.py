"""Whole runs with the model in the box: real sockets, real agents in processes, real training."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from tests import runs
from tests.runs import SMALL, Story


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.finish(runs.demo(folder, *SMALL))
    return folder


@pytest.fixture(scope="module")
def told(whole: Path) -> Story:
    return runs.story(whole)


def test_a_run_leaves_what_it_promises(whole: Path, told: Story) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["seeds"] == [0]
    for key in ("start", "end", "start_greedy", "end_greedy"):
        assert 0 <= summary[key] <= 1
    assert summary["before"]["test"].keys() == {"reward", "right_call"}
    assert (whole / "curve.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/pg_loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "val-core/test/reward/mean@1" in line] == [0, 1, 2, 3, 4]
    assert Counter(rollout.mode for rollout in told.rollouts) == {"train": 64, "eval": 40, "greedy": 40}
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["best", "step-000002-1", "step-000004-1"]
    assert (whole / "checkpoints" / "best" / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_evaluation_may_take_several_samples_of_every_task(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.finish(runs.demo(folder, *SMALL, "loop.steps=0", "loop.eval_samples=3"))
    rollouts = runs.story(folder).rollouts
    assert Counter(rollout.mode for rollout in rollouts) == {"eval": 24, "greedy": 8}
    assert len({rollout.seed for rollout in rollouts}) == 32
    sampled, greedily = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sampled["val-core/test/reward/mean@3"] == mean(r.reward("reward") for r in rollouts if r.mode == "eval")
    assert "val-core/test-greedy/reward/mean@1" in greedily


def test_token_law(told: Story) -> None:
    """Every prompt that extends a context holds the sampled ids of that context unchanged, and nothing branched."""
    extended = 0
    for turns in told.turns.values():
        by_id = {turn.id: turn for turn in turns}
        for turn in turns:
            assert turn.branch is None
            if turn.parent is not None:
                parent = by_id[turn.parent]
                assert turn.prompt_ids[: turn.shared] == parent.ids
                assert turn.shared == len(parent.ids)
                extended += 1
    assert extended > 20


def test_logprob_law_on_every_token(whole: Path, told: Story) -> None:
    sampled = sum(len(turn.response_ids) for r in told.rollouts if r.mode == "train" for turn in told.turns[r.id])
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["tokens_checked"] == sampled
    assert summary["max_logprob_diff"] < 1e-4


def test_no_rollout_is_trained_on_twice_and_none_is_lost(told: Story) -> None:
    consumed = Counter(id for step in told.steps for id in step.rollouts)
    assert set(consumed.values()) == {1}
    assert set(consumed) == {rollout.id for rollout in told.rollouts if rollout.mode == "train"}
    for step in told.steps:  # nothing vanishes: what carried no loss is counted under its reason
        counted = sum(value for name, value in step.metrics.items() if name.startswith("filter/"))
        assert counted == len(step.dropped)


def test_training_changes_the_weights(told: Story) -> None:
    assert len({step.digest for step in told.steps}) > 1


@pytest.mark.parametrize("workers", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_nothing_depends_on_how_many_agents_are_at_work(whole: Path, tmp_path: Path, workers: int) -> None:
    runs.finish(runs.demo(tmp_path / "run", *SMALL, f"runner.workers={workers}"))
    runs.same(whole, tmp_path / "run")


def test_another_seed_is_another_run(whole: Path, tmp_path: Path) -> None:
    runs.finish(runs.demo(tmp_path / "run", *SMALL, "loop.steps=1", seed=1))
    assert runs.story(tmp_path / "run").tokens() != runs.story(whole).tokens()


def test_killed_and_resumed_is_bit_for_bit_the_same(whole: Path, tmp_path: Path) -> None:
    """Killed twice while step 4 is collected: step 3 lies after the last checkpoint and must be replayed, and rollouts
    of step 4 that had ended stay, while those running or queued may only be sampled by the restored weights. Step 4 is
    also where all tasks have been used and their second order begins."""
    folder = tmp_path / "run"
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(runs.demo(folder, *SMALL), runs.during_step(folder, 4, ended=3))
    assert runs.kill_when(resume, runs.during_step(folder, 4, ended=8))
    runs.finish(resume)
    runs.same(whole, folder)
    ours, theirs = (json.loads((place / "summary.json").read_text()) for place in (folder, whole))
    assert ours["scores"] == theirs["scores"]
    assert [step for step, _ in ours["scores"]["test"]["reward"]] == [0, 1, 2, 3, 4]
    told = runs.story(folder)
    tasks = [rollout.task.id for rollout in told.rollouts if rollout.mode == "train" and rollout.member == 0]
    assert len(set(tasks[:14])) == 14 < len(tasks)
    assert [step.version for step in told.steps] == ["1.1", "1.2", "3.3", "3.4"]
    assert [step.version for step in told.history if step.superseded] == ["1.3", "2.3"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/pg_loss" in line] == [1, 2, 3, 4]


@pytest.mark.fault
def test_killed_while_a_checkpoint_is_written(whole: Path, tmp_path: Path) -> None:
    """At the first sight of one, whole or not, again and again: of step 2 if it is to be made again, then of step 4."""
    folder = tmp_path / "run"
    resume = runs.strop("train", "--resume", folder, "--json")

    def seen(*names: str) -> Callable[[], bool]:
        return lambda: any(next((folder / "checkpoints").glob(f"{name}*"), None) for name in names)

    assert runs.kill_when(runs.demo(folder, *SMALL), seen(".step-000002-1", "step-000002-1"))
    assert runs.kill_when(resume, seen(".step-000002-2", "step-000002-2", ".step-000004-2", "step-000004-2"))
    runs.kill_when(resume, seen(".step-000004-3", "step-000004-3"))  # or it was done
    runs.finish(resume)
    runs.same(whole, folder)
    ours, theirs = (json.loads((place / "summary.json").read_text()) for place in (folder, whole))
    assert ours["scores"] == theirs["scores"]
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert not [name for name in names if name.startswith(".")]
    assert [step.checkpoint in names for step in runs.story(folder).steps] == [False, True, False, True]


@pytest.mark.fault
def test_killed_while_it_replays(whole: Path, tmp_path: Path) -> None:
    """What was committed is replayed again, not sampled again."""
    folder = tmp_path / "run"
    settings = [*SMALL, "loop.checkpoint_every=9"]
    resume = runs.strop("train", "--resume", folder, "--json")
    assert runs.kill_when(runs.demo(folder, *settings), runs.during_step(folder, 4, ended=1))
    before = runs.story(folder).tokens()
    assert runs.kill_when(resume, runs.committed(folder, lineage=2, step=1))
    runs.finish(resume)
    told = runs.story(folder)
    runs.same(whole, folder)
    assert all(rollout.group == rollout.group.partition("~")[0] for rollout in told.rollouts)
    assert before.items() <= told.tokens().items()


@pytest.mark.slow
def test_resume_without_deterministic_mode_trains_no_rollout_twice(tmp_path: Path) -> None:
    """Replayed weights need not be the same bits then: what the lost weights sampled is dropped, by name."""
    folder = tmp_path / "run"
    settings = [*SMALL, "engine.deterministic=false"]
    assert runs.kill_when(runs.demo(folder, *settings), runs.during_step(folder, 4, ended=3))
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    told = runs.story(folder)
    consumed = Counter(id for step in told.steps for id in step.rollouts)
    assert set(consumed.values()) == {1}
    assert len(consumed) == 64
    superseded = {id for id, reason in told.steps[3].dropped.items() if reason == "superseded"}
    assert superseded == {f"g{n:06d}.{m}" for n in range(12, 16) for m in range(4)}
    assert not superseded & set(consumed)


@pytest.mark.fault
def test_a_runner_that_is_killed_changes_nothing(whole: Path, tmp_path: Path) -> None:
    folder, done = tmp_path / "run", []

    def kill_an_agent(family: list[int]) -> None:
        worker = [pid for pid in family if b"strop.runners" in Path(f"/proc/{pid}/cmdline").read_bytes()][-1]
        os.kill(worker, signal.SIGKILL)
        done.append(worker)

    assert runs.disturb(runs.demo(folder, *SMALL), runs.during_step(folder, 2, ended=2), kill_an_agent).returncode == 0
    assert done
    runs.same(whole, folder)


@pytest.mark.fault
def test_a_learner_that_is_killed_ends_the_run_with_a_sentence(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill_the_learner(family: list[int]) -> None:
        learner = next(pid for pid in family if b"strop.learner" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(learner, signal.SIGKILL)

    done = runs.disturb(runs.demo(folder, *SMALL), runs.during_step(folder, 2, ended=2), kill_the_learner)
    assert done.returncode == 1
    assert "killed by signal 9" in done.stderr
    assert "resume" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    runs.same(whole, folder)  # no agent was blamed for it


@pytest.mark.slow
def test_told_to_stop_it_says_how_to_go_on_and_does(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def stop(family: list[int]) -> None:
        learner = next(pid for pid in family if b"strop.learner" in Path(f"/proc/{pid}/cmdline").read_bytes())
        parent = Path(f"/proc/{learner}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGTERM)

    done = runs.disturb(runs.demo(folder, *SMALL), runs.during_step(folder, 2, ended=1), stop)
    assert done.returncode == 130
    assert done.stderr == "strop: stopped; what was collected is kept\n"
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    runs.same(whole, folder)


@pytest.mark.slow
def test_interrupted_once_it_finishes_its_step_with_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def interrupt(family: list[int]) -> None:
        learner = next(pid for pid in family if b"strop.learner" in Path(f"/proc/{pid}/cmdline").read_bytes())
        parent = Path(f"/proc/{learner}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGINT)

    done = runs.disturb(runs.demo(folder, *SMALL), runs.during_step(folder, 3, ended=1), interrupt)
    assert done.returncode == 130
    steps = runs.story(folder).steps
    assert [step.checkpoint for step in steps] == [None, "step-000002-1", "step-000003-1"]  # 3 is no multiple of 2
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    runs.same(whole, folder)
    assert [step.version for step in runs.story(folder).steps] == ["1.1", "1.2", "1.3", "2.4"]  # nothing was replayed
