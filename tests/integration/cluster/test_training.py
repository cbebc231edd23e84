"""Runs on a real Ray cluster of several nodes: they end, whoever is killed, and nothing is lost, trained twice or left
behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import runs
from tests.integration.cluster.nodes import TWO_RANKS, ClusterRun, Nodes, find_processes, list_groups
from tests.limits import stretch
from tests.postgres import postgres_server

__all__ = ["postgres_server"]  # a fixture

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

KILLS = int(os.environ.get("STROP_TEST_KILLS", "8"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(3, 3)
    yield nodes
    nodes.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[ClusterRun]]:
    started: list[ClusterRun] = []
    yield started
    for run in started:
        run.end()


def begin(nodes: Nodes, started: list[ClusterRun], tmp_path: Path, *settings: str) -> ClusterRun:
    run = ClusterRun(tmp_path / "run", nodes.address, *TWO_RANKS, *settings)
    started.append(run)
    return run


def check_nothing_left(nodes: Nodes, folder: Path) -> None:
    deadline = time.monotonic() + stretch(20)
    while (left := find_processes(folder)) or list_groups(nodes.address):
        assert time.monotonic() < deadline, (left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left])
        time.sleep(0.2)


def test_two_ranks_and_two_pools_train_on_two_nodes(nodes, started, tmp_path) -> None:
    run = begin(nodes, started, tmp_path)
    said = run.finish()
    told = run.check()
    assert "note: plan: rank 1 on" in said
    assert "note: plan: runner pool 1 on" in said
    assert "per rank (2 ranks)" in said
    assert said.index("plan: expected bottleneck") < said.index("step 1/3")
    ranks, pools = run.events("started", "rank"), run.events("started", "runner pool")
    assert len({one["node"] for one in ranks}) == len({one["node"] for one in pools}) == 2
    for log in ("learner.log", "learner-1.log", "runner-0.log", "runner-1.log"):
        assert (tmp_path / "run" / log).stat().st_mode & 0o077 == 0
    attempts = {rollout.attempts for rollout in told.rollouts}
    assert attempts == {1}
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.postgres
def test_pools_are_added_for_what_is_queued_in_postgresql(nodes, started, tmp_path, postgres_server) -> None:
    url = postgres_server.url("on_a_cluster")
    settings = ["cluster.runners=1", "cluster.max_runners=2", "runner.workers=2", f"store.url={url}"]
    run = begin(nodes, started, tmp_path, *settings)
    said = run.finish()
    run.check(url=url)
    assert "plan: runner pool 1" not in said
    assert len(run.events("started", "runner pool")) == 2


@pytest.mark.fault
@pytest.mark.parametrize("which", ["pid", "host"])
def test_a_rank_is_killed_and_the_run_goes_on(nodes, started, tmp_path, which) -> None:
    run = begin(nodes, started, tmp_path)
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    os.kill(run.events("started", "rank 1")[0][which], signal.SIGKILL)
    said = run.finish()
    run.check()
    assert "the learner is started again, from the run's last checkpoint" in said
    assert len(run.events("started", "rank 1")) == 2
    assert len(run.events("died", "learner")) == 1
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
@pytest.mark.parametrize("hung", [["pid"], ["pid", "host"]])
def test_a_rank_hangs_and_the_run_goes_on(nodes, started, tmp_path, hung) -> None:
    """By itself, and with the actor above it, which then neither tells of it nor kills it."""
    run = begin(nodes, started, tmp_path, "learner.hang_timeout=8")
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    rank = run.events("started", "rank 1")[0]
    for which in hung:
        os.kill(rank[which], signal.SIGSTOP)
    run.finish()
    run.check()
    (died,) = run.events("died", "learner")
    assert died["why"] == "rank 1 has not answered for 8 s (learner.hang_timeout) and was killed"
    assert len(run.events("started", "rank 1")) == 2
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
@pytest.mark.parametrize("which", ["pid", "host"])
def test_a_runner_pool_is_killed_and_is_started_again(nodes, started, tmp_path, which) -> None:
    run = begin(nodes, started, tmp_path)
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    os.kill(run.events("started", "runner pool 1")[0][which], signal.SIGKILL)
    run.wait_for(lambda: run.events("started again", "runner pool 1"))
    said = run.finish()
    run.check()
    assert len(run.events("died", "runner pool 1")) == 1
    assert "(raylet)" not in said
    assert run.events("died", "learner") == []


@pytest.mark.fault
def test_a_node_is_lost_and_another_one_takes_over(nodes, started, tmp_path) -> None:
    spare = Nodes(3, 3)
    try:
        run = ClusterRun(tmp_path / "run", spare.address, *TWO_RANKS, "loop.steps=4")
        started.append(run)
        run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
        lost = run.events("started", "rank 1")[0]["node"].rpartition("/")[2]
        node = next(node for node in spare.added if node.node_id.startswith(lost))
        spare.remove(node)
        spare.add(3)
        run.finish()
        run.check(steps=4)
        assert len({one["node"] for one in run.events("started", "rank")}) == 3
        assert len(run.events("died", "learner")) >= 1
    finally:
        spare.close()


@pytest.mark.fault
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_nothing(nodes, started, tmp_path, times) -> None:
    """Once: behind the step at hand. Twice: at once. Either way the run can be resumed, on the cluster or without."""
    run = begin(nodes, started, tmp_path, "loop.steps=40")
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    for _ in range(times):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    stdout, stderr = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, stderr
    assert "stopped; go on with" in stdout
    assert "Traceback" not in stderr
    check_nothing_left(nodes, tmp_path / "run")
    assert not [one for one in runs.story(tmp_path / "run").rollouts if one.status == "running"]
    if times == 2:
        there = runs.story(tmp_path / "run").steps[-1].number
        here = ["--cluster", "", "--set", "runner.workers=4", "--steps", str(there + 1)]
        runs.finish(runs.strop("train", "--resume", tmp_path / "run", *here))
        run.check(steps=there + 1)


@pytest.mark.fault
def test_a_command_that_is_killed_leaves_nothing(nodes, started, tmp_path) -> None:
    run = begin(nodes, started, tmp_path, "loop.steps=40")
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    run.process.kill()
    run.process.communicate()
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
def test_a_learner_that_dies_again_and_again_ends_the_run(nodes, started, tmp_path) -> None:
    run = begin(nodes, started, tmp_path, "cluster.restarts=1")
    for times in (1, 2):
        found = run.wait_for(lambda times=times: run.events("started", "rank 0")[times - 1 :])
        with suppress(ProcessLookupError):
            os.kill(found[0]["pid"], signal.SIGKILL)
    _, stderr = run.process.communicate(timeout=120)
    assert run.process.returncode == 1
    assert "rank 0 was killed by signal 9" in stderr
    assert stderr.count("\n") == 1
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
def test_killed_again_and_again(nodes, started, tmp_path) -> None:
    """Anything of it, at random moments: also while it is being started again."""
    draw = random.Random(int(os.environ.get("STROP_KILL_SEED", "0")))
    run = begin(nodes, started, tmp_path, "loop.steps=6", "cluster.restarts=100")
    kills: Counter[str] = Counter()
    run.wait_for(runs.during_step(tmp_path / "run", 1, ended=1))
    while kills.total() < KILLS and run.process.poll() is None:
        time.sleep(draw.uniform(0.5, 6.0))
        newest = {one["what"]: one for one in run.events("started")}
        what, which = draw.choice(sorted(newest)), draw.choice(["pid", "host"])
        with suppress(ProcessLookupError):
            os.kill(newest[what][which], signal.SIGKILL)
            kills[f"{what.rstrip('0123456789 ')} {which}"] += 1
    run.finish(timeout=400)
    run.check(steps=6)
    print("killed", dict(kills), "at step", runs.story(tmp_path / "run").steps[-1].number)
    check_nothing_left(nodes, tmp_path / "run")
