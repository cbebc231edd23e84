"""The pool with real agents in real processes and a real store."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import AgentError, PlaceError, StoreError, Unavailable
from strop.store.sqlite import SqliteStore
from strop.types import Event, Retry, Reward, Rollout, Task
from tests.limits import stretch
from tests.unit.runners.stand import (
    AGENT,
    AGENTS,
    ASYNC,
    alive,
    at_work,
    children,
    ended,
    enqueue,
    eventually,
    lease_renewed,
    make_pool,
    run,
    running,
    written,
)


async def test_what_agents_return_raise_and_do(store: SqliteStore):
    async with running(store, workers=3) as pool:
        value, named, none, nan, text, failed, gone = await run(
            store,
            {"do": "return", "value": 0.5},
            {"do": "return", "value": {"reward": 1, "format": 0.25}},
            {"do": "return"},
            {"do": "nan"},
            {"do": "return", "value": "good"},
            {"do": "raise"},
            {"do": "exit"},
        )
    assert (value.status, value.reward()) == ("succeeded", 0.5)
    assert (named.reward(), named.reward("format")) == (1.0, 0.25)
    assert (none.status, none.rewards) == ("succeeded", ())
    assert (nan.status, nan.cause) == ("failed", "bad_reward")
    assert nan.detail is not None
    assert "finite number" in nan.detail
    assert (text.cause, text.attempts) == ("bad_reward", 1)
    assert (failed.cause, failed.attempts) == ("agent_error", 1)
    assert failed.detail is not None
    assert failed.detail.endswith("ValueError: out of order")
    assert (gone.cause, gone.attempts) == ("lost_runner", 2)
    assert gone.detail == "the agent's process died: exit code 3"
    assert pool.counts == {"leased": 8, "succeeded": 3, "bad_reward": 2, "agent_error": 1, "lost_runner": 2}


async def test_async_agents(store: SqliteStore):
    async with running(store, ASYNC):
        (done,) = await run(store, {"do": "return"})
    assert done.reward() == 2.0


async def test_an_agent_that_takes_too_long_is_stopped(store: SqliteStore):
    async with running(store, workers=1, timeout=1.5):
        began = time.monotonic()
        slow, spinning, after = await run(
            store, {"do": "sleep", "seconds": 60}, {"do": "spin"}, {"do": "return", "value": 1}
        )
        assert time.monotonic() - began < stretch(20)
    assert (slow.cause, slow.attempts) == ("timeout", 1)
    assert slow.detail == "the agent was stopped after 1.5 s (runner.timeout)"
    assert spinning.cause == "timeout"
    assert after.reward() == 1.0


async def test_an_agent_s_time_counts_from_when_the_model_answers(store: SqliteStore):
    async with running(store, workers=2, timeout=1.5) as pool:
        pool.stop_clock()
        ids = await enqueue(store, {"do": "sleep", "seconds": 2.5}, {"do": "sleep", "seconds": 60})
        await asyncio.sleep(2.0)  # longer than an agent may take
        stats, began = await store.stats(), time.monotonic()
        pool.go_on()
        patient, slow = await ended(store, ids)
        took = time.monotonic() - began
    assert stats["running"] == 2
    assert patient.status == "succeeded"
    assert slow.cause == "timeout"
    assert took > 1.4


async def test_a_clock_that_was_not_stopped_gives_nobody_more_time(store: SqliteStore):
    async with running(store, workers=1, timeout=1.0) as pool:
        ids = await enqueue(store, {"do": "sleep", "seconds": 60})
        began, ending = time.monotonic(), asyncio.create_task(ended(store, ids))
        while not ending.done() and time.monotonic() - began < stretch(10):
            pool.go_on()  # as after every step
            await asyncio.sleep(0.2)
        (slow,) = await ending
    assert slow.cause == "timeout"
    assert time.monotonic() - began < stretch(10)


async def test_a_cancelled_rollout_stops_its_agent(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "child"
    async with running(store, workers=1, lease=0.6) as pool:
        ids = await enqueue(store, {"do": "child", "file": str(file)})
        await written(file)
        await store.cancel(ids, detail="not wanted any more")
        assert await eventually(lambda: not alive(int(file.read_text())))
        (stopped,) = await ended(store, ids)
        assert stopped.status == "cancelled"
        (after,) = await run(store, {"do": "return", "value": 1})
        assert pool.counts == {"leased": 2, "abandoned": 1, "succeeded": 1}
    assert after.reward() == 1.0


async def test_an_answer_nobody_wants_any_more_is_dropped(store: SqliteStore, tmp_path: Path):
    """The rollout is cancelled, and the agent ends before a heartbeat could tell."""
    go = tmp_path / "go"
    async with running(store, agents_in="threads", workers=1) as pool:
        ids = await enqueue(store, {"do": "until", "file": str(go)})
        await at_work(store, 1)
        await store.cancel(ids, detail="not wanted any more")
        go.touch()
        assert await eventually(lambda: pool.counts["abandoned"])
    assert (await store.get(ids[0])).rewards == ()


async def test_heartbeats_keep_long_rollouts(store: SqliteStore, tmp_path: Path):
    async with running(store, agents_in="threads", workers=2, lease=3.0):
        ids = await enqueue(store, *({"do": "until", "file": str(tmp_path / "go")} for _ in range(2)))
        await at_work(store, 2)
        for id in ids:
            await lease_renewed(store, id)
        (tmp_path / "go").touch()
        done = await ended(store, ids)
    assert [(r.status, r.attempts) for r in done] == [("succeeded", 1)] * 2


async def test_what_there_is_no_room_for_stays_in_the_queue(store: SqliteStore, tmp_path: Path):
    go = tmp_path / "go"
    async with running(store, agents_in="threads", workers=2, name="here"):
        ids = await enqueue(store, *({"do": "until", "file": str(go)} for _ in range(5)))
        await at_work(store, 2)
        await asyncio.sleep(0.2)
        stats = await store.stats()
        assert (stats["running"], stats["queued"]) == (2, 3)
        elsewhere = await store.lease("elsewhere", seconds=30, count=9)
        assert len(elsewhere) == 3
        for lease in elsewhere:
            await store.finish(lease.rollout.id, lease.attempt.number)
        go.touch()
        await ended(store, ids)
    runners = [attempt.runner for id in ids for attempt in await store.attempts(id)]
    assert runners == ["here", "here", "elsewhere", "elsewhere", "elsewhere"]


async def test_a_runner_is_named_after_its_machine_and_process(store: SqliteStore):
    async with running(store, agents_in="threads"):
        (done,) = await run(store, {"do": "return"})
    (attempt,) = await store.attempts(done.id)
    assert attempt.runner == f"{socket.gethostname()}-{os.getpid()}"


async def test_at_most_so_many_at_once_and_workers_are_kept(store: SqliteStore):
    url = "http://127.0.0.1:9/r/g000.0/1/agents/main/v1"
    async with running(store, workers=2):
        done = await run(store, *({"do": "address", "url": url} for _ in range(20)))
    assert len({r.reward("worker") for r in done}) <= 2
    assert [r.reward("same") for r in done] == [1.0] + [0.0] * 19


async def test_a_task_picks_its_agent(store: SqliteStore):
    async with running(store, {None: AGENT, "other": ASYNC}):
        main, other, missing = await run(
            store,
            {"do": "return", "value": 1},
            Task(id="b", agent="other", data={"do": "return"}),
            Task(id="c", agent="third", data={}),
        )
    assert (main.reward(), other.reward()) == (1.0, 2.0)
    assert (missing.cause, missing.detail) == (
        "agent_error",
        "task 'c' picks the agent 'third', which is not there: add it to `agents` (other)",
    )


async def test_without_a_main_agent_every_task_must_pick_one(store: SqliteStore):
    async with running(store, {"other": ASYNC}, agents_in="loop"):
        (lost,) = await run(store, {"do": "return"})
    assert lost.detail == "task 'g000' picks no agent, and there is no main one: set `agent`"


async def test_an_agent_let_down_by_the_engine_is_not_blamed(store: SqliteStore, tmp_path: Path):
    """The gateway says so in an event; what an agent makes of it is its own affair."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, time\ndef agent(task, llm):\n    while not os.path.exists(task.data): time.sleep(0.01)\n    1 / 0"
    )
    async with running(store, f"{script}:agent", agents_in="threads", workers=1):
        ids = await enqueue(store, Task(id="t", data=str(tmp_path / "go")), retries={"engine_error": Retry(limit=1)})
        await at_work(store, 1)
        event = Event(rollout=ids[0], attempt=1, kind="error", data={"code": "engine_error"}, time=0.0)
        await store.add_events([event])
        (tmp_path / "go").touch()
        await ended(store, ids)
    assert [a.cause for a in await store.attempts(ids[0])] == ["engine_error", "agent_error"]


@pytest.mark.parametrize(("code", "cause"), [("engine_down", "engine_error"), ("engine_error", "timeout")])
async def test_an_agent_that_nobody_answered_has_not_run_out_of_time(store: SqliteStore, code: str, cause: str):
    async with running(store, agents_in="threads", workers=1, timeout=1.0):
        ids = await enqueue(store, Task(id="t", data={"do": "sleep", "seconds": 60}))
        await at_work(store, 1)
        event = Event(rollout=ids[0], attempt=1, kind="error", data={"code": code}, time=0.0)
        await store.add_events([event])
        await ended(store, ids)
    assert [a.cause for a in await store.attempts(ids[0])] == [cause]


async def test_calls_of_a_killed_agent_settle_before_its_attempt_ends(store: SqliteStore):
    settled: list[tuple[str, int, bool]] = []

    async def wait(rollout: str, attempt: int) -> None:
        (last,) = await store.attempts(rollout)
        settled.append((rollout, attempt, last.ended is None))

    async with running(store, workers=3, timeout=2.0, wait_for_calls=wait):
        ids = [
            r.id
            for r in await run(
                store, {"do": "return"}, {"do": "sleep", "seconds": 60}, {"do": "exit"}, {"do": "raise"}, retries={}
            )
        ]
    assert sorted(settled) == [(ids[1], 1, True), (ids[2], 1, True)]


async def test_broken_agents_are_told_before_anything_begins(store: SqliteStore, tmp_path: Path):
    before = children()
    (tmp_path / "broken_agent.py").write_text("import not_there_xyz")
    (tmp_path / "dying_agent.py").write_text("import os; os._exit(7)")
    for spec, says in (
        (f"{tmp_path}/broken_agent.py:agent", "ModuleNotFoundError: No module named 'not_there_xyz'"),
        (f"{tmp_path}/dying_agent.py:agent", "died: exit code 7"),
        (f"{AGENTS}", "names no function"),
        ({None: AGENT, "b": f"{tmp_path}/broken_agent.py:agent"}, "not_there_xyz"),
    ):
        with pytest.raises(AgentError, match=says):
            async with running(store, spec):
                pass
        assert children() <= before
    with pytest.raises(PlaceError, match="cannot write the runners' log"):
        async with running(store, log=tmp_path / "none" / "log"):
            pass


async def test_close_is_prompt_and_leaves_attempts_to_be_reclaimed(store: SqliteStore):
    async with running(store, workers=2) as pool:
        ids = await enqueue(store, {"do": "spin"}, {"do": "spin"})
        await at_work(store, 2)
        began = time.monotonic()
        await pool.close()
        assert time.monotonic() - began < stretch(15)
    assert {r.status for r in await store.list()} == {"running"}
    assert sorted(await store.reclaim(everything=True)) == ids
    assert {r.status for r in await store.list()} == {"queued"}


async def test_watch_raises_what_the_pool_cannot_survive(store: SqliteStore):
    async with running(store, agents_in="threads", workers=1, lease=0.2) as pool:
        watching = asyncio.create_task(pool.watch())
        await asyncio.sleep(0.3)
        assert not watching.done()
        await store.close()
        with pytest.raises(StoreError, match="is closed"):
            await asyncio.wait_for(watching, 10)


async def test_a_reward_for_what_cannot_be_written_ends_one_attempt_only(store: SqliteStore, tmp_path: Path):
    script = tmp_path / "agent.sh"
    script.write_text("""echo '[{"name": "x", "value": 1, "agent": "\\ud800"}]'""")
    async with running(store, f"sh {script}", workers=1):
        bad, after = await run(store, {}, {})
    assert (bad.cause, after.cause) == ("bad_reward", "bad_reward")
    assert bad.detail is not None
    assert "printable characters" in bad.detail


async def test_words_that_the_store_does_not_take_end_one_attempt_only(tmp_path: Path):
    class Picky(SqliteStore):
        async def add_events(self, events: Sequence[Event]) -> None:
            if any("unspeakable" in event.data["text"] for event in events):
                raise StoreError("'data' of a event cannot be stored")
            await super().add_events(events)

        async def finish(self, rollout: str, attempt: int, *, rewards: Sequence[Reward] = (), **given: Any) -> Rollout:
            if any(reward.value == 13 for reward in rewards):
                raise StoreError("13 cannot be stored")
            return await super().finish(rollout, attempt, rewards=rewards, **given)

    settled: list[str] = []

    async def wait(rollout: str, attempt: int) -> None:
        settled.append(rollout)

    store = await Picky.open(tmp_path / "picky.sqlite")
    async with running(store, workers=1, wait_for_calls=wait) as pool:
        said, given, after = await run(
            store,
            {"do": "print", "text": "unspeakable"},
            {"do": "return", "value": 13},
            {"do": "return", "value": 1},
        )
    assert (said.cause, said.detail) == ("agent_error", "'data' of a event cannot be stored")
    assert (given.cause, given.detail) == ("agent_error", "13 cannot be stored")
    assert after.reward() == 1.0
    assert settled == [said.id, given.id]  # nobody knows what they left behind
    assert pool.counts == {"leased": 3, "agent_error": 2, "succeeded": 1}
    await store.close()


async def test_a_store_that_is_away_when_an_attempt_ends_is_the_end_of_the_pool(store: SqliteStore, tmp_path: Path):
    async with running(store, agents_in="threads", workers=1, lease=600) as pool:
        await enqueue(store, {"do": "until", "file": str(tmp_path / "go")})
        await at_work(store, 1)
        await pool._stop_leasing()  # or that would find out first
        await store.close()
        (tmp_path / "go").touch()
        with pytest.raises(Unavailable, match="is closed"):
            await asyncio.wait_for(pool.watch(), 10)
    assert pool.counts == {"leased": 1}


async def test_an_agent_that_cannot_be_closed_keeps_no_other_from_it(store: SqliteStore):
    pool = make_pool(store, {None: AGENT, "second": AGENT, "third": AGENT}, workers=1)
    before = children()
    await pool.start()
    folder = pool._folder
    assert folder is not None
    close = pool._agents["second"].close

    async def fails() -> None:
        await close()
        raise OSError("it does not close")

    pool._agents["second"].close = fails
    with pytest.raises(OSError, match="it does not close"):
        await pool.close()
    assert children() <= before
    assert not os.path.exists(folder)  # noqa: ASYNC240
    await asyncio.wait_for(pool.watch(), 10)


async def test_watch_ends_when_the_pool_is_closed(store: SqliteStore):
    async with running(store, agents_in="threads", workers=1) as pool:
        watching = asyncio.create_task(pool.watch())
        await asyncio.sleep(0)
    await asyncio.wait_for(watching, 10)


async def test_nothing_is_leased_before_work_begins(store: SqliteStore):
    """A resumed run has rollouts queued before its weights are the right ones again."""
    (id,) = await enqueue(store, {"do": "sleep"})
    pool = make_pool(store, agents_in="threads", workers=1)
    await pool.start()
    try:
        await asyncio.sleep(0.3)
        assert (await store.get(id)).status == "queued"
    finally:
        await pool.close()
