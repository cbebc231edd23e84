"""`--cluster auto` where there is no cluster: one is started on this machine, and is gone with the command."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests import runs
from tests.integration.cluster.nodes import ClusterRun, find_processes

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def list_ray() -> set[int]:
    """The processes of Ray clusters on this machine."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if b"/ray/core/src/ray/" in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


@pytest.mark.parametrize("stopped", [False, True])
def test_a_cluster_is_started_and_ended(tmp_path, stopped) -> None:
    if list_ray():
        pytest.skip("a Ray cluster is on this machine already")
    settings = ["cluster.runners=1", "runner.workers=4", "loop.steps=40" if stopped else "loop.steps=2"]
    run = ClusterRun(tmp_path / "run", "auto", *settings)
    try:
        if stopped:
            run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
            below = {*runs.descendants(run.process.pid)} & list_ray()
            assert below
            for _ in range(2):
                run.process.send_signal(signal.SIGINT)
            _, stderr = run.process.communicate(timeout=120)
            assert run.process.returncode == 130, stderr
        else:
            below: set[int] = set()
            said = run.finish()
            assert "note: plan: rank 0 on" in said
            run.check(steps=2)
    finally:
        run.end()
    assert [pid for pid in below if runs.alive(pid)] == []
    assert find_processes(tmp_path / "run") == []
    assert "RAY_ADDRESS" not in os.environ
