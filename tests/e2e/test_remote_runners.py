"""Runners that join a training run by its URL and key, as processes of their own: one is killed, the run is stopped and
resumed, and what is wrong is said in a sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from strop.net import addresses
from strop.types import TERMINAL
from tests import runs
from tests.runs import SMALL

REMOTE = [*SMALL, "runner.workers=0", "runner.remote=true", "runner.lease=2", "loop.eval_splits=[]"]


class Machines:
    """A run in one process and runners in others. What is left of them is ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self._processes: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def popen(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def train(self, *settings: str) -> subprocess.Popen[str]:
        return self.popen(runs.demo(self.run, *REMOTE, f"gateway.port={self.port}", *settings))

    def join(self, *options: str) -> subprocess.Popen[str]:
        """A runner, once the run answers."""
        addresses.read(self.url, timeout=120)
        key = (self.run / "key").read_text().strip()
        command = runs.strop("runner", "--url", self.url, "--agent", "strop.demo:agent", "--workers", "4")
        return self.popen([*command, "--set", "runner.lease=2", *options], STROP_KEY=key)

    def end_all(self) -> None:
        for process in self._processes:
            for pid in [*runs.descendants(process.pid), process.pid] if process.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    machines.end_all()


def wait_for(moment: Callable[[], bool], process: subprocess.Popen[str], limit: float = 120) -> None:
    deadline = time.monotonic() + limit
    while not moment():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


def check(folder: Path, *, steps: int) -> runs.Story:
    """Every rollout has ended once, and nothing was trained on twice."""
    told = runs.story(folder)
    assert [step.number for step in told.steps] == list(range(1, steps + 1))
    assert set(Counter(id for step in told.steps for id in step.rollouts).values()) == {1}
    assert all(rollout.status in TERMINAL for rollout in told.rollouts)
    assert sum(len(step.rollouts) for step in told.steps) == steps * 16
    return told


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("workers", [1, 2])
def test_one_of_two_runners_is_killed_and_nothing_is_lost(machines: Machines, workers: int) -> None:
    run = machines.train(f"gateway.workers={workers}")
    first, second = machines.join("--name", "first", "--json"), machines.join("--name", "second")
    wait_for(runs.during_step(machines.run, 2, ended=4), run)
    for pid in [first.pid, *runs.descendants(first.pid)]:  # as when the machine dies
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, stderr = run.communicate(timeout=200)
    assert run.returncode == 0, stderr
    told = check(machines.run, steps=4)
    stdout, stderr = second.communicate(timeout=30)
    assert second.returncode == 0, stderr
    assert f"the run has ended: {machines.url}" in stdout
    assert all(rollout.status == "succeeded" for rollout in told.rollouts)


@pytest.mark.slow
@pytest.mark.fault
def test_a_runner_outlasts_a_run_that_is_killed_and_resumed(machines: Machines) -> None:
    run = machines.train()
    runner = machines.join()
    wait_for(runs.during_step(machines.run, 2, ended=4), run)
    family = [run.pid, *runs.descendants(run.pid)]
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    while any(map(runs.alive, family)):
        time.sleep(0.05)
    resumed = machines.popen(runs.strop("train", "--resume", machines.run))
    stdout, stderr = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, stderr
    assert f"runners join with STROP_KEY from {machines.run}/key: strop runner --url {machines.url} --agent" in stdout
    told = check(machines.run, steps=4)
    stdout, stderr = runner.communicate(timeout=30)
    assert runner.returncode == 0, stderr
    assert f"waiting for {machines.url}, for up to 600 s: it cannot be reached" in stderr
    assert f"{machines.url} is back" in stderr
    assert f"the run has ended: {machines.url}" in stdout
    assert {cause for cause in (rollout.cause for rollout in told.rollouts) if cause} <= {"cancelled"}


@pytest.mark.slow
def test_stopped_it_leaves_nothing_running_and_runners_wait(machines: Machines) -> None:
    run = machines.train()
    runner = machines.join("--wait", "5")
    wait_for(runs.during_step(machines.run, 2, ended=4), run)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert not [rollout for rollout in runs.story(machines.run).rollouts if rollout.status == "running"]
    _, stderr = runner.communicate(timeout=60)
    assert runner.returncode == 1
    assert "cannot be reached (tried for 5 s" in stderr
    assert "Fix: check the address, and whether `strop train` with runner.remote" in stderr


@pytest.mark.slow
def test_what_is_wrong_is_one_sentence(machines: Machines) -> None:
    run = machines.train("loop.steps=1", "runner.workers=1", "loop.groups=2")
    wrong = runs.strop("runner", "--url", machines.url, "--agent", "strop.demo:agent")
    addresses.read(machines.url, timeout=120)
    refused = machines.popen(wrong, STROP_KEY="wrong")
    _, stderr = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "the key does not open the store at" in stderr
    assert stderr.count("\n") == 1
    run.communicate(timeout=200)
    assert run.returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free.listen()
    nobody = runs.strop("train", "strop.demo:agent", "--tasks", "strop.demo:tasks", "--set", "runner.workers=0")
    done = subprocess.run(nobody, cwd=machines.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "runner.workers is 0, so nobody runs agents. Fix: raise it, or let runners join" in done.stderr
