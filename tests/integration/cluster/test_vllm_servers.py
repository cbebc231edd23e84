"""Runs on a real Ray cluster whose engines are real vLLM servers, for CPUs, on its nodes: learner ranks train, every
replica gets each version, and whoever is lost, nothing else is.

Needs `python benchmarks/peers/vllm_cpu.py`, which takes minutes; skipped where that was not run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.integration.cluster.nodes import ClusterRun, Nodes
from tests.integration.cluster.test_training import check_nothing_left
from tests.integration.cluster.vllm_servers import REPLICAS, is_there, untie

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not is_there(), reason="run python benchmarks/peers/vllm_cpu.py"),
]
TWO_RANKS = ["learner.ranks=2", "cluster.runners=1"]


@pytest.fixture
def started() -> Iterator[list[ClusterRun | Nodes]]:
    started: list[ClusterRun | Nodes] = []
    yield started
    for one in reversed(started):
        one.end() if isinstance(one, ClusterRun) else one.close()


def begin(started: list[ClusterRun | Nodes], cpus: list[int], folder: Path, *settings: str) -> tuple[Nodes, ClusterRun]:
    nodes = Nodes(*cpus)
    started.append(nodes)
    run = ClusterRun(folder, nodes.address, *REPLICAS, *settings)
    started.append(run)
    return nodes, run


@pytest.fixture
def untied(tmp_path: Path) -> str:
    return f"policy.model={untie(tmp_path / 'model')}"


def check_versions(run: ClusterRun, steps: int) -> None:
    """Every turn is of the weights that its step began with, whichever replica answered, to the logprob."""
    told = run.check(steps=steps)
    for step in told.steps:
        versions = {version for id in step.rollouts for turn in told.turns[id] for _, version in turn.versions}
        assert versions == {f"1.{step.number - 1}"}
    for line in runs.metrics(run.folder):
        assert line["training/rollout_probs_diff_max"] < 1e-4, line


@pytest.mark.fault
def test_both_servers_are_killed_while_ranks_train(started, tmp_path, untied) -> None:
    nodes, run = begin(started, [4, 4], tmp_path / "run", *TWO_RANKS, untied)
    run.wait_for(runs.during_step(run.folder, 2, ended=2), limit=400)
    first, second = run.events("started", "engine server")
    assert first["node"] != second["node"]
    os.kill(first["pid"], signal.SIGKILL)
    os.kill(second["host"], signal.SIGKILL)
    said = run.finish(timeout=500)
    check_versions(run, steps=3)
    assert said.count("note: plan: engine server ") == 2
    again = run.events("started again", "engine server")
    assert {one["what"] for one in again} == {"engine server 0", "engine server 1"}
    assert [one["host"] == first["host"] for one in again if one["what"] == first["what"]] == [True]
    assert run.events("died", "learner") == []
    check_nothing_left(nodes, run.folder)


@pytest.mark.fault
def test_a_servers_node_is_lost_and_the_other_one_answers(started, tmp_path, untied) -> None:
    nodes, run = begin(started, [3, 2, 2], tmp_path / "run", *TWO_RANKS, untied, "cluster.server_cpus=2")
    run.wait_for(runs.during_step(run.folder, 2, ended=2), limit=400)
    lost = run.events("started", "engine server")[0]["node"].rpartition("/")[2]
    nodes.remove(next(node for node in nodes.added if node.node_id.startswith(lost)))
    run.finish(timeout=400)
    check_versions(run, steps=3)
    assert len(run.events("died", "engine server")) == 1
    assert run.events("died", "learner") == []
    check_nothing_left(nodes, run.folder)


def test_adapters_and_a_command_that_is_killed(started, tmp_path) -> None:
    adapters = ["learner.lora.rank=8", "policy.model=strop/nano"]
    nodes, run = begin(started, [4], tmp_path / "run", *adapters, "cluster.runners=1", "loop.steps=40")
    run.wait_for(runs.during_step(run.folder, 3, ended=2), limit=400)
    run.process.kill()
    run.process.communicate()
    check_nothing_left(nodes, run.folder)
    versions = {v for turns in runs.story(run.folder).turns.values() for turn in turns for _, v in turn.versions}
    assert {"1.0", "1.1", "1.2"} <= versions
