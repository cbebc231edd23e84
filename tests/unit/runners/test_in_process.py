"""Agents inside the runner's own process: in its event loop, and in threads."""

import asyncio
from pathlib import Path

import pytest

from strop.errors import AgentError
from strop.runners import in_process
from strop.runners.in_process import InProcessAgent
from strop.store.sqlite import SqliteStore
from tests.unit.runners.stand import (
    AGENT,
    AGENTS,
    ASYNC,
    at_work,
    children,
    ended,
    enqueue,
    eventually,
    run,
    running,
    written,
)


def inloop_of(pool) -> InProcessAgent:
    agent = pool._agents[None]
    assert isinstance(agent, InProcessAgent)
    return agent


async def test_what_agents_in_the_loop_return_and_raise(store: SqliteStore):
    before = children()
    async with running(store, ASYNC, agents_in="loop"):
        assert children() <= before  # no process is started for it
        value, named, failed, left = await run(
            store, {"do": "return"}, {"do": "return", "value": {"format": 1}}, {"do": "raise"}, {"do": "exit"}
        )
        (after,) = await run(store, {"do": "return"})  # the loop has survived sys.exit
    assert (value.reward(), named.reward("format"), after.reward()) == (2.0, 1.0, 2.0)
    assert failed.cause == "agent_error"
    assert failed.detail is not None
    assert failed.detail.endswith("ValueError: out of order")
    assert "runners/in_process.py" not in failed.detail
    assert (left.cause, left.detail and left.detail.endswith("SystemExit: 3")) == ("agent_error", True)


async def test_a_thousand_agents_at_once(store: SqliteStore):
    """Each waits until all of them are there."""
    async with running(store, ASYNC, agents_in="loop", workers=1000, timeout=120) as pool:
        done = await ended(store, await enqueue(store, *({"do": "meet", "count": 1000} for _ in range(1000))), 120)
    assert {r.reward() for r in done} == {1.0}
    assert pool.counts == {"leased": 1000, "succeeded": 1000}


async def test_a_function_that_would_block_the_loop_is_refused(store: SqliteStore):
    with pytest.raises(
        AgentError, match=r'is not async\. Fix: write it as `async def`, or set runner.agents_in to "threads"'
    ):
        async with running(store, AGENT, agents_in="loop"):
            pass


async def test_a_client_that_would_block_the_loop_is_refused(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loop"):
        (refused,) = await run(store, {"do": "client"})
    assert refused.detail is not None
    assert "use llm.async_client()" in refused.detail


async def test_events_and_rewards_of_agents_in_the_loop(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loop"):
        done, bad, odd = await run(store, {"do": "reward"}, {"do": "bad_reward"}, {"do": "odd_event"})
    assert (done.reward(), done.reward("format")) == (1.0, 0.5)
    events = await store.events(done.id)
    assert [event.data.get("text") for event in events] == ["first", "second", None]
    assert (bad.status, bad.cause) == ("failed", "bad_reward")
    assert odd.detail is not None
    assert "an event is a kind and a dict: Invalid enum value 'thought'" in odd.detail


async def test_an_event_that_cannot_be_written_is_refused_where_it_is_said(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loop"):
        text, odd, after = await run(store, {"do": "surrogate"}, {"do": "no_json"}, {"do": "return"})
    for bad, says in ((text, "surrogates not allowed"), (odd, "object is unsupported")):
        assert bad.cause == "agent_error"
        assert bad.detail is not None
        assert "StropError: an event is a kind and a dict" in bad.detail
        assert says in bad.detail
    assert after.reward() == 2.0


@pytest.mark.parametrize("agents_in", ["loop", "threads"])
async def test_the_reward_function(store: SqliteStore, agents_in: str):
    async with running(store, ASYNC, agents_in=agents_in, reward=f"{AGENTS}:judge"):
        (done,) = await run(store, {"do": "return", "value": 3})
    assert done.reward() == 30.0


async def test_a_task_that_is_cancelled_may_clear_up(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loop", timeout=1.0):
        (slow,) = await run(store, {"do": "sleep", "file": str(tmp_path / "file")})
    assert slow.cause == "timeout"
    assert (tmp_path / "file").read_text() == "told to stop"


async def test_a_task_that_does_not_hear_is_left_behind_and_counted(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(in_process, "GRACE", 0.3)
    go = tmp_path / "go"
    async with running(store, ASYNC, agents_in="loop", timeout=0.5, workers=1) as pool:
        slow, after = await run(store, {"do": "deaf", "file": str(go)}, {"do": "return"})
        assert (slow.cause, after.reward()) == ("timeout", 2.0)
        assert len(inloop_of(pool).stuck) == 1
        go.touch()
        assert await eventually(lambda: not inloop_of(pool).stuck)
    assert (await store.get(slow.id)).rewards == ()  # what it says in the end is not heard


# -- threads -----------------------------------------------------------------------------------------------------------


async def test_what_agents_in_threads_return_and_raise(store: SqliteStore):
    before = children()
    async with running(store, agents_in="threads"):
        assert children() <= before
        value, failed = await run(store, {"do": "return", "value": 1}, {"do": "raise"})
    assert value.reward() == 1.0
    assert failed.detail is not None
    assert failed.detail.endswith("ValueError: out of order")


async def test_async_agents_in_threads(store: SqliteStore):
    async with running(store, ASYNC, agents_in="threads"):
        (done,) = await run(store, {"do": "return"})
    assert done.reward() == 2.0


async def test_agents_in_threads_run_at_once_and_no_more_than_workers(store: SqliteStore, tmp_path: Path):
    go = tmp_path / "go"
    async with running(store, AGENT, agents_in="threads", workers=8):
        ids = await enqueue(store, *({"do": "until", "file": str(go)} for _ in range(10)))
        await at_work(store, 8)
        await asyncio.sleep(0.1)
        assert (await store.stats())["queued"] == 2
        go.touch()
        assert {r.reward() for r in await ended(store, ids)} == {1.0}


async def test_a_thread_that_does_not_end_is_left_behind_and_another_takes_its_place(
    store: SqliteStore, tmp_path: Path
):
    go = tmp_path / "go"
    async with running(store, AGENT, agents_in="threads", timeout=0.5, workers=1) as pool:
        slow, after = await run(store, {"do": "until", "file": str(go)}, {"do": "return", "value": 1})
        assert (slow.cause, after.reward()) == ("timeout", 1.0)
        assert len(inloop_of(pool).stuck) == 1
        go.touch()
        assert await eventually(lambda: not inloop_of(pool).stuck)
    assert (await store.get(slow.id)).rewards == ()


async def test_too_many_that_do_not_end_stop_the_pool(store: SqliteStore, tmp_path: Path):
    go = tmp_path / "go"
    async with running(store, AGENT, agents_in="threads", timeout=0.3, workers=2) as pool:
        await enqueue(store, *({"do": "until", "file": str(go)} for _ in range(6)))
        with pytest.raises(AgentError, match=r'were told to stop and did not: .* runner.agents_in to "processes"'):
            await asyncio.wait_for(pool.watch(), 20)
        go.touch()
        assert await eventually(lambda: not inloop_of(pool).stuck)


async def test_a_cancelled_rollout_frees_its_place(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loop", lease=0.6, workers=1) as pool:
        ids = await enqueue(store, {"do": "sleep", "file": str(tmp_path / "file")})
        await at_work(store, 1)
        await store.cancel(ids, detail="not wanted any more")
        await written(tmp_path / "file")
        (after,) = await run(store, {"do": "return"})
        assert pool.counts == {"leased": 2, "abandoned": 1, "succeeded": 1}
    assert after.reward() == 2.0
