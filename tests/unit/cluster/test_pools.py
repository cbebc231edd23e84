"""How many runner pools a run has, and the options that each is started with."""

from pathlib import Path

import pytest

from strop.cli import parser
from strop.cli.served_store import START_SECONDS
from strop.cluster.pools import SHORT, count_pools, list_words, read_last_line
from strop.config import load
from strop.store.sql import SqlStore
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task


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
