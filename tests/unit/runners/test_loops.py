"""Async agents in event loops of a few processes: what each has to itself, and what becomes of the others."""

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from strop.errors import AgentError
from strop.runners import loops
from strop.runners.loops import LoopsAgent, LoopWorkerLink
from strop.runners.output import KEPT
from strop.store.sqlite import SqliteStore
from tests.unit.runners.stand import (
    AGENT,
    AGENTS,
    ASYNC,
    alive,
    at_work,
    ended,
    enqueue,
    eventually,
    printed,
    run,
    running,
    written,
)


def workers_of(pool) -> list[LoopWorkerLink]:
    agent = pool._agents[None]
    assert isinstance(agent, LoopsAgent)
    return [worker for worker in agent._workers if isinstance(worker, LoopWorkerLink)]


async def test_what_agents_return_and_raise(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops"):
        value, named, failed, left = await run(
            store, {"do": "return"}, {"do": "return", "value": {"format": 1}}, {"do": "raise"}, {"do": "exit"}
        )
        (after,) = await run(store, {"do": "return"})  # the loop has survived sys.exit
    assert (value.reward(), named.reward("format"), after.reward()) == (2.0, 1.0, 2.0)
    assert failed.cause == "agent_error"
    assert failed.detail is not None
    assert failed.detail.endswith("ValueError: out of order")
    assert "runners/loop_worker.py" not in failed.detail
    assert (left.cause, left.detail and left.detail.endswith("SystemExit: 3")) == ("agent_error", True)


async def test_many_run_at_once_in_a_few_processes(store: SqliteStore):
    """Each waits until all of its process are there."""
    async with running(store, ASYNC, agents_in="loops", loops=2, workers=200, timeout=120) as pool:
        done = await ended(store, await enqueue(store, *({"do": "meet", "count": 100} for _ in range(200))), 120)
        assert len(workers_of(pool)) == 2
    assert {r.reward() for r in done} == {1.0}
    assert pool.counts == {"leased": 200, "succeeded": 200}


async def test_a_function_that_would_block_the_loop_is_refused(store: SqliteStore):
    with pytest.raises(AgentError, match=r'is not async\. Fix: .* set runner.agents_in to "processes"'):
        async with running(store, AGENT, agents_in="loops"):
            pass


async def test_a_client_that_would_block_the_loop_is_refused(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops"):
        (refused,) = await run(store, {"do": "client"})
    assert refused.detail is not None
    assert "use llm.async_client()" in refused.detail


async def test_events_and_rewards(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops"):
        done, bad, odd, after = await run(
            store, {"do": "reward"}, {"do": "bad_reward"}, {"do": "odd_event"}, {"do": "return"}
        )
    assert (done.reward(), done.reward("format")) == (1.0, 0.5)
    assert [event.data.get("text") for event in await store.events(done.id)] == ["first", "second", None]
    assert (bad.status, bad.cause) == ("failed", "bad_reward")
    assert odd.detail is not None
    assert "an event is a kind and a dict: Invalid enum value 'thought'" in odd.detail
    assert after.reward() == 2.0


async def test_the_reward_function_prints_into_the_rollout_too(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops", reward=f"{AGENTS}:judge"):
        (done,) = await run(store, {"do": "return", "value": 3})
    assert done.reward() == 30.0
    assert await printed(store, done.id) == "judging 3\n"


async def test_each_rollout_has_what_it_printed(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loops", loops=1, workers=8, log=tmp_path / "log"):
        done = await run(store, *({"do": "print", "text": f"grüße {n}"} for n in range(8)))
    for n, rollout in enumerate(done):
        assert await printed(store, rollout.id) == f"grüße {n}\n" * 3 + f"from a thread grüße {n}\n"
    assert (tmp_path / "log").read_text() == ""


async def test_much_output_is_cut_and_says_so(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops", loops=1):
        (done,) = await run(store, {"do": "print_much", "line": "x" * 99 + "\n", "lines": 12_000})
    *events, last = await store.events(done.id)
    assert sum(len(event.data["text"]) for event in events) == KEPT
    assert last.data["dropped"] == 1_200_000 - KEPT


async def test_each_rollout_has_variables_of_its_own(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops", loops=1, workers=8):
        done = await run(store, *({"do": "environment"} for _ in range(8)))
    assert len({rollout.reward("worker") for rollout in done}) == 1
    for rollout in done:
        for name in ("url", "mine", "task", "home", "gone"):
            assert rollout.reward(name) == 1.0, name


async def test_tasks_that_an_agent_leaves_are_cancelled(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loops", loops=1):
        (done,) = await run(store, {"do": "leave", "file": str(tmp_path / "file")})
        assert await written(tmp_path / "file") == "cancelled"
    assert done.reward() == 1.0


# -- agents that are stopped -------------------------------------------------------------------------------------------


async def test_one_that_takes_too_long_may_clear_up(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loops", loops=1, timeout=1.0) as pool:
        (before,) = workers_of(pool)
        (slow,) = await run(store, {"do": "sleep", "file": str(tmp_path / "file")})
        (after,) = await run(store, {"do": "process"})
        assert after.reward("worker") == before.pid  # which is none the worse for it
    assert slow.cause == "timeout"
    assert (tmp_path / "file").read_text() == "told to stop"


async def test_a_cancelled_rollout_frees_its_place(store: SqliteStore, tmp_path: Path):
    async with running(store, ASYNC, agents_in="loops", lease=0.6, workers=1) as pool:
        ids = await enqueue(store, {"do": "sleep", "file": str(tmp_path / "file")})
        await at_work(store, 1)
        await store.cancel(ids, detail="not wanted any more")
        await written(tmp_path / "file")
        (after,) = await run(store, {"do": "return"})
        assert pool.counts == {"leased": 2, "abandoned": 1, "succeeded": 1}
    assert after.reward() == 2.0


async def test_one_that_does_not_stop_has_its_worker_replaced_when_others_are_done(store: SqliteStore, tmp_path: Path):
    never, go = tmp_path / "never", tmp_path / "go"
    async with running(store, ASYNC, agents_in="loops", loops=1, timeout=3.0, workers=2, lease=600) as pool:
        (before,) = workers_of(pool)
        deaf = await enqueue(store, {"do": "deaf", "file": str(never)}, retries={})
        (deaf,) = await ended(store, deaf)
        assert deaf.cause == "timeout"
        assert await eventually(lambda: not alive(before.pid))
        (after,) = await run(store, {"do": "process"})
        assert after.reward("worker") not in (None, before.pid)
    assert not go.exists()


async def test_one_that_blocks_the_loop_fails_and_the_others_are_tried_again(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loops, "BLOCK_LIMIT", 1.0)
    go = tmp_path / "go"
    async with running(store, ASYNC, agents_in="loops", loops=1, workers=2, timeout=120.0) as pool:
        (before,) = workers_of(pool)
        (blocks,) = await enqueue(store, {"do": "block", "file": str(tmp_path / "blocked")}, retries={})
        await written_or_there(tmp_path / "blocked")
        (other,) = await enqueue(store, {"do": "until", "file": str(go)})
        (blocks,) = await ended(store, [blocks])
        go.touch()
        (other,) = await ended(store, [other])
    assert blocks.cause == "agent_error"
    assert blocks.detail is not None
    assert "blocked the event loop that it shares with others for 1 s. Fix: await" in blocks.detail
    assert not alive(before.pid)
    assert (other.status, other.attempts) == ("succeeded", 2)
    assert [attempt.cause for attempt in await store.attempts(other.id)] == ["lost_runner", None]


async def test_one_that_holds_the_interpreter_is_ended_at_its_time_limit(store: SqliteStore):
    async with running(store, ASYNC, agents_in="loops", loops=1, workers=1, timeout=2.0) as pool:
        (before,) = workers_of(pool)
        (spins,) = await run(store, {"do": "spin"}, retries={})
        (after,) = await run(store, {"do": "process"})
    assert spins.cause == "timeout"
    assert after.reward("worker") not in (None, before.pid)


async def written_or_there(file: Path) -> None:
    assert await eventually(file.exists, 30)


# -- workers that die --------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_is_replaced_and_its_rollouts_tried_again(store: SqliteStore, tmp_path: Path):
    go = tmp_path / "go"
    async with running(store, ASYNC, agents_in="loops", loops=1, workers=3) as pool:
        (before,) = workers_of(pool)
        ids = await enqueue(
            store,
            {"do": "kill_once", "mark": str(tmp_path / "mark"), "file": str(go)},
            {"do": "until", "file": str(go)},
        )
        await at_work(store, 2)
        await written_or_there(tmp_path / "mark")
        os.kill(before.pid, 9)
        go.touch()
        killed, other = await ended(store, ids)
        (after,) = await run(store, {"do": "process"})
        assert len(workers_of(pool)) == 1
    assert (killed.status, killed.attempts, killed.reward()) == ("succeeded", 2, 1.0)
    assert (other.status, other.attempts) == ("succeeded", 2)
    for rollout in (killed, other):
        first, _ = await store.attempts(rollout.id)
        assert (first.cause, first.detail) == ("lost_runner", "the agent's process died: killed by SIGKILL")
    assert after.attempts == 1
    (event,) = await store.events(killed.id, attempt=1)  # what it printed before is not lost
    assert event.data["text"] == "last words\n"


@pytest.mark.parametrize("kill", [False, True], ids=["pool ends", "worker dies"])
async def test_what_agents_started_ends_with_their_worker(store: SqliteStore, tmp_path: Path, kill: bool):
    file = tmp_path / "child"
    async with running(store, ASYNC, agents_in="loops", loops=1):
        await run(store, {"do": "child", "file": str(file)} | ({"kill": True} if kill else {}), retries={})
        pid = int(file.read_text())
        if kill:
            assert await eventually(lambda: not alive(pid))
    assert await eventually(lambda: not alive(pid))


PROGRAM = """
    import asyncio, sys
    from strop.config import RunnerConfig
    from strop.runners.pool import Pool
    from strop.store.sqlite import SqliteStore
    from strop.types import Rollout, Task

    async def main():
        store = await SqliteStore.open(sys.argv[1])
        settings = RunnerConfig(workers=4, agents_in="loops", loops=2)
        pool = Pool(store, {None: sys.argv[2]}, settings, gateway_url="http://127.0.0.1:9", model="main")
        await pool.start()
        pool.work()
        data = {"do": "block", "file": sys.argv[3]}
        await store.enqueue([Rollout(id="g.0", group="g", member=0, created=0.0, task=Task(id="t", data=data))])
        (agent,) = pool._agents.values()
        print(pool._folder, agent._fork_server._process.pid, *(w.pid for w in agent._workers), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


async def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path):
    program, file = tmp_path / "program.py", tmp_path / "blocked"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, program, tmp_path / "s.sqlite", ASYNC, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        folder, *numbers = (await asyncio.to_thread(parent.stdout.readline)).decode().split()
        pids = [int(number) for number in numbers]
        assert len(pids) == 3
        await written_or_there(file)
        parent.kill()
        assert await eventually(lambda: not any(alive(pid) for pid in pids)), [pid for pid in pids if alive(pid)]
        assert not os.path.exists(folder)  # noqa: ASYNC240
