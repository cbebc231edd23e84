"""A run whose gateway workers are killed -9 again and again: it goes on, and nothing that was answered is lost."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import runs

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def find_workers(run: int) -> list[int]:
    """The worker processes of a run."""
    children = Path(f"/proc/{run}/task/{run}/children").read_text().split()
    return [int(pid) for pid in children if b"gateway.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_run_outlives_its_workers(tmp_path: Path) -> None:
    settings = ("gateway.workers=2", "loop.steps=8", "loop.eval_splits=[]")
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    runs.finish(runs.demo(whole, *settings), timeout=400)
    run, killed = subprocess.Popen(runs.demo(folder, *settings), stdout=subprocess.DEVNULL), 0
    while run.poll() is None and killed < 3:
        time.sleep(4.0)
        workers = find_workers(run.pid) if (folder / "config.json").exists() else []
        if len(workers) == 2:  # agents are at work, and the one killed before has a successor
            os.kill(workers[killed % 2], signal.SIGKILL)
            killed += 1
    assert (run.wait(400), killed) == (0, 3)
    ours, theirs = runs.story(folder), runs.story(whole)
    assert [(rollout.id, rollout.cause) for rollout in ours.rollouts if rollout.cause] == []
    assert [len(step.rollouts) for step in ours.steps] == [len(step.rollouts) for step in theirs.steps]
    assert ours.tokens().keys() == theirs.tokens().keys()
    assert all(step.metrics["training/rollout_logprobs_diff_max"] < 1e-4 for step in ours.steps)
    assert "it is replaced" in (folder / "gateway.log").read_text()
