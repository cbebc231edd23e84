"""A cluster whose head is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.integration.cluster.nodes import TWO_RANKS, ClusterRun, Nodes, find_processes

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def test_a_run_ends_with_a_sentence_and_goes_on_elsewhere(tmp_path: Path) -> None:
    first, folder = Nodes(3, 3), tmp_path / "run"
    address = first.address
    run = ClusterRun(folder, address, *TWO_RANKS, "loop.steps=8")
    try:
        run.wait_for(runs.during_step(folder, 2, ended=2))
        first.cluster.remove_node(first.cluster.head_node, allow_graceful=False)
        _, said = run.process.communicate(timeout=120)
        assert run.process.returncode == 2, said
        assert said.startswith(f"strop: the head of the Ray cluster at {address} is gone"), said
        assert said.count("\n") == 1
        assert find_processes(folder) == []
    finally:
        run.end()
        first.close()
    second = Nodes(3, 3)
    try:
        run.resume("--cluster", second.address)
        run.finish()
        run.check(steps=8)
        assert find_processes(folder) == []
    finally:
        run.end()
        second.close()
