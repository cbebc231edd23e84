"""The pool with real processes and a real store."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.config import RunnerConfig
from strop.errors import AgentError, PlaceError, StoreError
from strop.runners.pool import Pool
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task

AGENTS = Path(__file__).parent / "pool_agents.py"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def running(store: SqliteStore, spec: str = f"{AGENTS}:agent", log: Path | None = None, **config):
    settings = RunnerConfig(**({"workers": 2, "timeout": 20.0} | config))
    pool = Pool(store, spec, settings, gateway_url="http://127.0.0.1:9/", model="main", log=log)
    await pool.start()
    pool.work()
    try:
        yield pool
    finally:
        await pool.close()
    assert not children(), "processes are left"


def children() -> list[str]:
    """Processes whose parent is this one: the zygote, while a pool is open."""
    found = subprocess.run(["ps", "--no-headers", "-o", "pid,args", "--ppid", str(os.getpid())], capture_output=True)
    return [line for line in found.stdout.decode().splitlines() if "ps --no-headers" not in line]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def eventually(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def run(store: SqliteStore, *tasks: dict, max_attempts: int = 2) -> list[Rollout]:
    """Enqueue tasks and wait until all of them ended."""
    before = len(await store.list())
    ids = [f"g{before + i:03d}.0" for i in range(len(tasks))]
    await store.enqueue(
        [
            Rollout(id=id, group=id, member=0, task=Task(id=id, data=data), created=0.0, max_attempts=max_attempts)
            for id, data in zip(ids, tasks, strict=True)
        ]
    )
    async with asyncio.timeout(25):
        cursor = 0
        while True:
            cursor, _ = await store.wait(cursor, timeout=5)
            found = [await store.get(id) for id in ids]
            if all(r.ended for r in found):
                return found


async def test_what_agents_return_raise_and_do(store: SqliteStore):
    async with running(store, workers=3):
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


async def test_async_agents(store: SqliteStore):
    async with running(store, f"{AGENTS}:agent_async"):
        (done,) = await run(store, {"do": "return"})
    assert done.reward() == 2.0


async def test_an_agent_that_takes_too_long_is_stopped_and_its_worker_replaced(store: SqliteStore):
    async with running(store, workers=1, timeout=0.5):
        began = time.monotonic()
        slow, spinning, after = await run(
            store, {"do": "sleep", "seconds": 60}, {"do": "spin"}, {"do": "return", "value": 1}
        )
        assert time.monotonic() - began < 5
    assert (slow.cause, slow.attempts) == ("timeout", 1)
    assert slow.detail == "the agent was stopped after 0.5 s (runner.timeout)"
    assert spinning.cause == "timeout"
    assert after.reward() == 1.0


async def test_a_worker_that_dies_is_replaced_and_the_rollout_tried_again(store: SqliteStore, tmp_path: Path):
    async with running(store, workers=1):
        once, killed, after = await run(
            store, {"do": "exit_once", "mark": str(tmp_path / "mark")}, {"do": "kill"}, {"do": "return", "value": 1}
        )
    assert (once.status, once.attempts, once.reward()) == ("succeeded", 2, 1.0)
    assert (killed.cause, killed.detail) == ("lost_runner", "the agent's process died: killed by SIGKILL")
    assert after.reward() == 1.0


async def test_a_dead_worker_is_noticed_though_a_copy_of_it_lives_on(store: SqliteStore):
    async with running(store, workers=1):
        (lost,) = await run(store, {"do": "fork"}, max_attempts=1)
    assert lost.detail == "the agent's process died: exit code 4"


async def test_what_an_agent_started_ends_with_it(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "child"
    async with running(store, workers=1, timeout=1.0):
        await run(store, {"do": "child", "file": str(file)})
    assert await eventually(lambda: not alive(int(file.read_text())))


async def test_a_cancelled_rollout_stops_its_agent(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "child"
    async with running(store, workers=1, lease=0.6):
        asyncio.get_running_loop().call_later(
            0.5, lambda: cancels.append(asyncio.create_task(store.cancel(["g000.0"], detail="late")))
        )
        cancels: list[asyncio.Task[None]] = []
        (stopped,) = await run(store, {"do": "child", "file": str(file)})
        assert stopped.status == "cancelled"
        assert await eventually(lambda: not alive(int(file.read_text())))
        (after,) = await run(store, {"do": "return", "value": 1})
    assert after.reward() == 1.0


async def test_heartbeats_keep_long_rollouts(store: SqliteStore):
    async with running(store, workers=1, lease=0.3):
        (done,) = await run(store, {"do": "sleep", "seconds": 1.0})
    assert (done.status, done.attempts) == ("succeeded", 1)


async def test_lost_runners_of_others_are_reclaimed(store: SqliteStore):
    await store.enqueue(
        [Rollout(id="g9.0", group="g9", member=0, task=Task(id="t", data={"do": "return"}), created=0.0)]
    )
    await store.lease("elsewhere", seconds=0.05)
    async with running(store, workers=1, lease=0.4):
        cursor = 0
        async with asyncio.timeout(5):
            while (await store.get("g9.0")).status != "succeeded":
                cursor, _ = await store.wait(cursor, timeout=5)
    assert [a.cause for a in await store.attempts("g9.0")] == ["lost_runner", None]


async def test_at_most_so_many_at_once_and_workers_are_kept(store: SqliteStore):
    url = "http://127.0.0.1:9/r/g000.0/1/agents/main/v1"
    async with running(store, workers=2):
        done = await run(store, *({"do": "address", "url": url} for _ in range(20)))
    assert len({r.reward("worker") for r in done}) <= 2
    assert [r.reward("same") for r in done] == [1.0] + [0.0] * 19


async def test_broken_agents_are_told_before_anything_begins(store: SqliteStore, tmp_path: Path):
    (tmp_path / "broken_agent.py").write_text("import not_there_xyz")
    (tmp_path / "dying_agent.py").write_text("import os; os._exit(7)")
    for spec, says in (
        (f"{tmp_path}/broken_agent.py:agent", "ModuleNotFoundError: No module named 'not_there_xyz'"),
        (f"{tmp_path}/dying_agent.py:agent", "died: exit code 7"),
    ):
        with pytest.raises(AgentError, match=says):
            async with running(store, spec):
                pass
        assert not children()
    with pytest.raises(PlaceError, match="cannot write the runners' log"):
        async with running(store, log=tmp_path / "none" / "log"):
            pass


async def test_what_agents_print_goes_to_the_log(store: SqliteStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    log = tmp_path / "agents.log"
    async with running(store, log=log):
        await run(store, {"do": "print"})
    assert "hello from the agent\n" in log.read_text()
    assert "and from its stderr\n" in log.read_text()
    assert capfd.readouterr() == ("", "")


async def test_close_is_prompt_and_leaves_attempts_to_be_reclaimed(store: SqliteStore):
    async with running(store, workers=2) as pool:
        await store.enqueue(
            [
                Rollout(id="g0.0", group="g0", member=0, task=Task(id="t", data={"do": "spin"}), created=0.0),
                Rollout(id="g0.1", group="g0", member=1, task=Task(id="t", data={"do": "spin"}), created=0.0),
            ]
        )
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await pool.close()
        assert time.monotonic() - began < 2
    assert {r.status for r in await store.list()} == {"running"}
    assert sorted(await store.reclaim(everything=True)) == ["g0.0", "g0.1"]
    assert {r.status for r in await store.list()} == {"queued"}


async def test_the_process_workers_come_from_is_replaced_if_it_dies(store: SqliteStore):
    async with running(store, workers=1) as pool:
        assert pool._zygote is not None
        assert pool._zygote._process is not None
        os.kill(pool._zygote._process.pid, signal.SIGKILL)
        _, after = await run(store, {"do": "exit"}, {"do": "return", "value": 1}, max_attempts=1)
    assert after.reward() == 1.0


async def test_watch_raises_what_the_pool_cannot_survive(store: SqliteStore):
    async with running(store, workers=1, lease=0.2) as pool:
        watching = asyncio.create_task(pool.watch())
        await asyncio.sleep(0.3)
        assert not watching.done()
        await store.close()
        with pytest.raises(StoreError, match="is closed"):
            await asyncio.wait_for(watching, 5)


async def test_interrupts_are_the_parents_business(store: SqliteStore):
    async with running(store, workers=1) as pool:
        (worker,) = pool._workers
        os.killpg(worker.pid, signal.SIGINT)
        (done,) = await run(store, {"do": "return", "value": 1})
        assert worker in pool._workers
    assert done.attempts == 1


async def test_nothing_is_leased_before_work_begins(store: SqliteStore):
    """A resumed run has rollouts queued before its weights are the right ones again."""
    await store.enqueue([Rollout(id="g.0", group="g", member=0, created=0.0, task=Task(id="t", data={"do": "sleep"}))])
    pool = Pool(store, f"{AGENTS}:agent", RunnerConfig(workers=1), gateway_url="http://127.0.0.1:9/", model="main")
    await pool.start()
    try:
        await asyncio.sleep(0.3)
        assert (await store.get("g.0")).status == "queued"
    finally:
        await pool.close()


PROGRAM = """
    import asyncio, sys
    from strop.config import RunnerConfig
    from strop.runners.pool import Pool
    from strop.store.sqlite import SqliteStore
    from strop.types import Rollout, Task

    async def main():
        store = await SqliteStore.open(sys.argv[1])
        pool = Pool(store, sys.argv[2], RunnerConfig(workers=4), gateway_url="http://127.0.0.1:9", model="main")
        await pool.start()
        pool.work()
        doing = [{"do": "spin"}, {"do": "sleep", "seconds": 600}, {"do": "child", "file": sys.argv[3]}]
        await store.enqueue([
            Rollout(id=f"g.{i}", group="g", member=i, created=0.0, task=Task(id="t", data=data))
            for i, data in enumerate(doing)
        ])
        await asyncio.sleep(0.5)
        print(pool._folder, pool._zygote._process.pid, *(worker.pid for worker in pool._workers), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())  # not guarded by __name__: workers must not run it again
"""


async def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path):
    program, file = tmp_path / "program.py", tmp_path / "child"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, program, tmp_path / "s.sqlite", f"{AGENTS}:agent", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        folder, *numbers = parent.stdout.readline().decode().split()
        pids = [int(number) for number in numbers] + [int(file.read_text())]
        assert len(pids) == 6
        assert all(alive(pid) for pid in pids)
        assert os.path.isdir(folder)  # noqa: ASYNC240
        parent.kill()
        assert await eventually(lambda: not any(alive(pid) for pid in pids)), [pid for pid in pids if alive(pid)]
        assert not os.path.exists(folder)  # noqa: ASYNC240
