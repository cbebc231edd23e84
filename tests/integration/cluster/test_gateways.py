"""Gateways on the nodes of a real Ray cluster: agents ask them, and a run outlives them."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.integration.cluster.nodes import ClusterRun, Nodes, find_processes, list_groups
from tests.limits import stretch

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

TWO = ["learner.ranks=2", "cluster.gateways=2", "cluster.runners=2", "runner.workers=4", "runner.lease=3"]
KILLS = int(os.environ.get("STROP_TEST_KILLS", "8"))
NOT_THE_AGENTS = {None, "engine_error", "interrupted", "lost_runner"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A rank, a gateway and a runner pool on each of two."""
    nodes = Nodes(5, 5)
    yield nodes
    nodes.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[ClusterRun]]:
    started: list[ClusterRun] = []
    yield started
    for run in started:
        run.end()


def begin(nodes: Nodes, started: list[ClusterRun], tmp_path: Path, *settings: str) -> ClusterRun:
    run = ClusterRun(tmp_path / "run", nodes.address, *TWO, "cluster.rank_cpus=3", *settings)
    started.append(run)
    return run


def check_nothing_left(nodes: Nodes, folder: Path) -> None:
    deadline = time.monotonic() + stretch(20)
    while (left := find_processes(folder)) or list_groups(nodes.address):
        assert time.monotonic() < deadline, (left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left])
        time.sleep(0.2)


def check_blame(folder: Path) -> None:
    """No attempt ended by a fault that was taken for its agent's."""
    causes = {attempt.cause for attempt in list_attempts(folder)}
    assert causes <= NOT_THE_AGENTS, causes


def list_attempts(folder: Path) -> list[Any]:
    import asyncio

    from strop.store import open_store

    async def read() -> list[Any]:
        store = await open_store(folder)
        try:
            return [one for rollout in await store.list() for one in await store.attempts(rollout.id)]
        finally:
            await store.close()

    return asyncio.run(read())


def count_turns(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder / 'store.sqlite'}?mode=ro", uri=True)) as db:
        return db.execute("SELECT count(*) FROM turns").fetchone()[0]


def ask_turns(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=stretch(20)) as answer:
        return json.load(answer)["counts"].get("turns", 0)


def test_agents_ask_the_gateway_of_their_node(nodes, started, tmp_path) -> None:
    run = begin(nodes, started, tmp_path)
    run.wait_for(runs.during_step(tmp_path / "run", 3, ended=2))
    gateways = {one["node"]: one["url"] for one in run.events("started", "gateway")}
    recorded = count_turns(tmp_path / "run")
    each = [ask_turns(url) for url in gateways.values()]
    said = run.finish()
    run.check()
    pools = {one["node"]: one["url"] for one in run.events("started", "runner pool")}
    assert len(gateways) == len(set(gateways.values())) == 2
    assert pools == gateways
    assert min(each) > 0
    assert 32 <= recorded <= sum(each), "the command itself has answered some"
    assert "note: plan: gateway 1 on" in said
    assert not run.events("died")
    assert {attempt.number for attempt in list_attempts(tmp_path / "run")} == {1}
    for log in ("gateway-0.log", "gateway-1.log"):
        assert (tmp_path / "run" / log).stat().st_mode & 0o077 == 0
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("which", "number"), [("pid", signal.SIGKILL), ("host", signal.SIGKILL), ("pid", signal.SIGSTOP)]
)
def test_a_gateway_that_dies_or_hangs_is_started_again_at_its_address(nodes, started, tmp_path, which, number) -> None:
    run = begin(nodes, started, tmp_path)
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    (before,) = run.events("started", "gateway 1")
    os.kill(before[which], number)
    (after,) = run.wait_for(lambda: run.events("started again", "gateway 1"))
    run.finish()
    run.check()
    check_blame(tmp_path / "run")
    assert (after["url"], after["node"]) == (before["url"], before["node"])
    assert len(run.events("died", "gateway 1")) == 1
    assert run.events("died", "learner") == run.events("ended", "runner pool") == []
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
def test_a_command_that_is_told_to_end_takes_its_time(nodes, started, tmp_path) -> None:
    """Ray itself would abort it 3 seconds after SIGTERM. A gateway that hangs is waited for longer."""
    run = begin(nodes, started, tmp_path, "loop.steps=40")
    run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
    os.kill(run.events("started", "gateway 1")[0]["pid"], signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    stdout, stderr = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, stderr
    assert "stopped; go on with" in stdout
    assert stderr == "strop: stopped; what was collected is kept\n"
    check_nothing_left(nodes, tmp_path / "run")
    assert not [one for one in runs.story(tmp_path / "run").rollouts if one.status == "running"]


@pytest.mark.fault
def test_killed_again_and_again(nodes, started, tmp_path) -> None:
    """Gateways, pools and ranks, at random moments: also while they are being started again."""
    draw = random.Random(int(os.environ.get("STROP_KILL_SEED", "0")))
    run = begin(nodes, started, tmp_path, "loop.steps=10", "cluster.restarts=100")
    run.wait_for(runs.during_step(tmp_path / "run", 1, ended=1))
    for number in range(KILLS):
        time.sleep(draw.uniform(0.5, 5.0))
        newest = {one["what"]: one for one in run.events("started")}
        kinds = ["gateway"] if number % 2 else ["gateway", "rank", "runner pool"]
        what = draw.choice(sorted(what for what in newest if what.startswith(draw.choice(kinds))))
        with suppress(ProcessLookupError):
            os.kill(newest[what][draw.choice(["pid", "host"])], signal.SIGKILL)
    run.finish(timeout=400)
    run.check(steps=10)
    check_blame(tmp_path / "run")
    check_nothing_left(nodes, tmp_path / "run")


@pytest.mark.fault
@pytest.mark.parametrize("gateways", [2, 1])
def test_the_node_of_a_gateway_is_lost(started, tmp_path, gateways) -> None:
    """Ranks are elsewhere, and notice nothing. With one gateway, the pool on the node that is left had it as well, and
    is given another."""
    nodes = Nodes(6, 6, 6)
    try:
        words = [*TWO, f"cluster.gateways={gateways}", "cluster.rank_cpus=3", "cluster.runner_cpus=2", "loop.steps=30"]
        run = ClusterRun(tmp_path / "run", nodes.address, *words)
        started.append(run)
        run.wait_for(runs.during_step(tmp_path / "run", 2, ended=2))
        assert len({one["node"] for one in run.events("started", "rank")}) == 1
        before = run.events("started", "gateway")[-1]
        lost = before["node"].rpartition("/")[2]
        nodes.remove(next(node for node in nodes.added if node.node_id.startswith(lost)))
        (after,) = run.wait_for(lambda: run.events("started again", "gateway"))
        run.finish()
        run.check(steps=30)
        check_blame(tmp_path / "run")
        assert after["node"] != before["node"]
        assert run.events("died", "learner") == []
        moved = run.events("ended", "runner pool")
        assert [before["url"] in one["why"] for one in moved] == [True] * (2 - gateways)
        assert before["url"] not in {one.get("url") for one in run.events("started again", "runner pool")}
        check_nothing_left(nodes, tmp_path / "run")
    finally:
        nodes.close()
