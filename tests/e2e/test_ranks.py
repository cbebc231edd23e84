"""Runs whose model several ranks train: processes of one machine, over gloo."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import runs

TWO = ["learner.ranks=2", *runs.SMALL]


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    """One rank is killed: the run ends with a reason, and is resumed with another number of ranks."""
    folder = tmp_path / "run"

    def kill(processes: list[int]) -> None:
        ranks = [pid for pid in processes if "strop.learner.child" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)

    ended = runs.disturb(runs.demo(folder, *TWO), runs.named(folder, lineage=1, step=2), kill)
    assert ended.returncode == 1
    assert "rank 1 was killed by signal 9" in ended.stderr
    assert (folder / "learner-1.log").exists()
    told = finish(runs.strop("train", "--resume", folder, "--json", "--set", "learner.ranks=1"))
    assert told["steps"] == 4
    steps = runs.story(folder).steps
    assert [step.number for step in steps] == [1, 2, 3, 4]
    trained = [rollout for step in steps for rollout in step.rollouts]
    assert len(trained) == len(set(trained)) == 64


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def stop(processes: list[int]) -> None:
        ranks = [pid for pid in processes if "strop.learner.child" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(max(ranks), signal.SIGSTOP)

    command = runs.demo(folder, *TWO, "learner.hang_timeout=8")
    ended = runs.disturb(command, runs.named(folder, lineage=1, step=2), stop, limit=120)
    assert ended.returncode == 1
    assert "rank 1 has not answered for 8 s (learner.hang_timeout) and was killed" in ended.stderr
    assert "Fix: resume the run to go on" in ended.stderr
    assert finish(runs.strop("train", "--resume", folder, "--json"))["steps"] == 4


@pytest.mark.slow
def test_pieces_over_two_ranks(tmp_path: Path) -> None:
    told = finish(runs.demo(tmp_path / "run", "learner.sequence_parallel=2", *TWO))
    assert told["tokens_checked"] > 100


def finish(command: list[str]) -> dict[str, float]:
    told = json.loads(runs.finish(command).stdout)
    assert told["done"]
    assert told["max_logprob_diff"] < 1e-4
    assert told["end"] > told["start"]
    return told


def test_ranks_that_cannot_be_grouped_are_refused(tmp_path: Path) -> None:
    command = runs.demo(tmp_path / "run", "learner.ranks=3", "learner.sequence_parallel=2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Fix: set learner.ranks=2" in done.stderr
