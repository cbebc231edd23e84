"""How many runner pools a run has, and the options that each is started with."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.cli import parser
from strop.cli.served_store import START_SECONDS
from strop.cluster import pools
from strop.cluster.hosts import HostPlace
from strop.cluster.journal import Journal
from strop.cluster.pools import SHORT, RunnerPools, count_pools, list_words, read_last_line
from strop.config import load
from strop.monitor.console import Silent
from strop.store.sql import SqlStore
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task
from tests.limits import stretch


async def until(moment: Callable[[], bool]) -> None:
    async with asyncio.timeout(stretch(10)):
        while not moment():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_pool_runs_what_the_run_would_run_itself() -> None:
    config = load(
        agent="a.py:agent",
        agents={"other": "b.py:agent"},
        reward="r.py:f",
        runner={"workers": 3, "timeout": 7.0, "agents_in": "threads", "python": "/p y"},
    )
    words = list_words(config, "http://10.0.0.1:4000", 2)
    asked = parser("runner").parse_args(["runner", *words])
    assert (asked.url, asked.agent, asked.reward, asked.workers) == ("http://10.0.0.1:4000", "a.py:agent", "r.py:f", 3)
    assert (asked.key_file, asked.name) == ("-", "pool-2")
    theirs = load(sets=asked.set)
    assert theirs.agents == config.agents
    assert (theirs.runner.timeout, theirs.runner.agents_in, theirs.runner.python) == (7.0, "threads", "/p y")


async def test_pools_have_agents_for_all_that_is_queued_or_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SqlStore, "stats")  # it reads all that ever ended, every second
    store = await SqliteStore.open(tmp_path / "store.sqlite")

    async def count(least: int, most: int) -> int:
        config = load(runner={"workers": 4}, cluster={"runners": least, "max_runners": most})
        return await count_pools(config, store)

    assert await count(1, 9) == 1
    task = Task(id="t")
    await store.enqueue([Rollout(id=f"r{n}", group="g", member=n, task=task, created=0.0) for n in range(17)])
    leases = await store.lease("w", seconds=30, count=6)
    assert [await count(*bounds) for bounds in ((1, 9), (1, 3), (7, 9), (2, 0))] == [5, 3, 7, 2]
    for lease in leases:
        await store.finish(lease.rollout.id, 1)
    assert await count(1, 9) == 3  # for the eleven that are left
    await store.close()


def test_the_last_thing_that_a_pool_said(tmp_path) -> None:
    (tmp_path / "log").write_text("one\nstrop: there is no a.py. Fix: check it.\n\n")
    assert read_last_line(tmp_path / "log") == "strop: there is no a.py. Fix: check it"
    assert read_last_line(tmp_path / "none") == "it said nothing"


def test_a_pool_that_gives_up_reaching_the_run_counts_as_one_that_cannot_work() -> None:
    """Or else it would be started again for ever where `gateway.port` is blocked."""
    assert START_SECONDS + 20 < SHORT


class Host:
    """A pool's host, as a keeper sees it: what it was asked is written down."""

    def __init__(self, asked: list[object]) -> None:
        self._asked = asked

    def __getattr__(self, verb: str) -> SimpleNamespace:
        def remote(*args: object) -> SimpleNamespace:
            self._asked.append((verb, *args) if verb == "stop" else verb)
            answer: Future[object] = Future()
            answer.set_result({"describe": HostPlace("n0", "10.0.0.7", 1), "start": 71}.get(verb))
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(remote=remote)


async def test_a_pool_that_is_not_needed_any_more_lets_its_agents_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exceptions = pytest.importorskip("ray.exceptions", reason="Ray is not installed: make cluster")
    monkeypatch.setattr(pools, "BEAT", 0.01)
    monkeypatch.setattr(pools, "IDLE", 0.05)
    wanted, asked = [2], list[object]()

    async def count(*_: object) -> int:
        return wanted[0]

    monkeypatch.setattr(pools, "count_pools", count)
    monkeypatch.setattr(RunnerPools, "_place", lambda self, node: Host(asked))
    shared = SimpleNamespace(url="http://127.0.0.1:4000", key="k")
    run = SimpleNamespace(store=None, shared=shared, folder=SimpleNamespace(path=tmp_path))
    config = load(runner={"drain": 7.0}, gateway={"host": "0.0.0.0"})
    ray = SimpleNamespace(exceptions=exceptions, kill=asked.append)
    kept = RunnerPools(ray, config, "10.0.0.9", [], Journal(tmp_path, Silent()))
    watching = asyncio.create_task(kept.watch(run))  # pyright: ignore

    def events(event: str) -> list[str]:
        file = tmp_path / "cluster.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line["what"] for line in lines if line["event"] == event]

    await until(lambda: events("started") == ["runner pool 0", "runner pool 1"])
    wanted[0] = 1
    await until(lambda: events("ended") == ["runner pool 1"])
    assert ("stop", 7.0) in asked
    wanted[0] = 2
    await until(lambda: len(events("started")) == 3)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert [one for one in asked if isinstance(one, tuple)] == [("stop", 7.0), ("stop", 0.0), ("stop", 0.0)]
