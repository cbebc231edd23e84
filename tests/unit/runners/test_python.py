"""Agents in worker processes: what they print, how they die, and what is left of them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from strop.agent.llm import LLM
from strop.config import RunnerConfig
from strop.errors import AgentError
from strop.runners import output
from strop.runners.base import Job
from strop.runners.output import KEPT, PIECE
from strop.runners.python import ProcessAgent
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, EventKind, Lease, Rollout, Task
from tests.unit.runners.stand import AGENT, AGENTS, alive, eventually, printed, run, running, written


def processes_of(pool) -> ProcessAgent:
    agent = pool._agents[None]
    assert isinstance(agent, ProcessAgent)
    return agent


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
        (lost,) = await run(store, {"do": "fork"}, retries={})
    assert lost.detail == "the agent's process died: exit code 4"


@pytest.mark.parametrize("session", [False, True], ids=["same session", "session of its own"])
@pytest.mark.parametrize("how", ["timeout", "death"])
async def test_what_an_agent_started_ends_with_it(store: SqliteStore, tmp_path: Path, session: bool, how: str):
    file = tmp_path / "child"
    doing = {"do": "child", "file": str(file), "session": session} | ({"die": True} if how == "death" else {})
    async with running(store, workers=1, timeout=2.0):
        await run(store, doing, retries={})
        assert await eventually(lambda: not alive(int(file.read_text())))


async def test_a_daemon_of_a_good_agent_ends_with_the_pool(store: SqliteStore, tmp_path: Path):
    async with running(store, workers=1):
        (done,) = await run(store, {"do": "daemon", "file": str(tmp_path / "daemon")}, retries={})
        pid = int(await written(tmp_path / "daemon"))
        (after,) = await run(store, {"do": "daemon", "file": str(tmp_path / "other")}, retries={})
        assert (done.status, after.status) == ("succeeded", "succeeded")
    assert await eventually(lambda: not alive(pid))


async def test_interrupts_are_the_parents_business(store: SqliteStore):
    async with running(store, workers=1) as pool:
        (worker,) = processes_of(pool)._workers
        os.killpg(worker.pid, signal.SIGINT)
        (done,) = await run(store, {"do": "return", "value": 1})
        assert worker in processes_of(pool)._workers
    assert done.attempts == 1


async def test_the_process_workers_come_from_is_replaced_if_it_dies(store: SqliteStore):
    async with running(store, workers=1) as pool:
        process = processes_of(pool)._fork_server._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        _, after = await run(store, {"do": "exit"}, {"do": "return", "value": 1}, retries={})
    assert after.reward() == 1.0


async def test_a_start_that_is_cancelled_confuses_no_other(store: SqliteStore):
    async with running(store, workers=1) as pool:
        agent = processes_of(pool)
        cancelled = asyncio.create_task(agent._start_worker())
        for _ in range(3):
            await asyncio.sleep(0)
        cancelled.cancel()
        worker = await agent._start_worker()
        agent._idle = [worker]
        (done,) = await run(store, {"do": "address", "url": ""})
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert done.reward("worker") == worker.pid


async def test_a_worker_that_died_while_idle_costs_nothing(store: SqliteStore):
    async with running(store, workers=1) as pool:
        (worker,) = processes_of(pool)._workers
        os.kill(worker.pid, signal.SIGKILL)
        assert await eventually(lambda: worker.is_gone)
        (done,) = await run(store, {"do": "return", "value": 1})
    assert (done.reward(), done.attempts) == (1.0, 1)


# -- imported ahead ----------------------------------------------------------------------------------------------------

IMPORTS = """
import os
with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
    print(os.getpid(), file=file)
{more}
def agent(task, llm):
    return {{"process": os.getpid(), "number": {number}}}
"""


async def import_counts(store: SqliteStore, folder: Path, more: str = "", number: str = "0", **given: Any) -> int:
    """How often an agent is imported by four workers that all run it."""
    (folder / "counted_agent.py").write_text(IMPORTS.format(more=more, number=number))
    async with running(store, f"{folder}/counted_agent.py:agent", workers=4, **given) as pool:
        assert len({worker.pid for worker in processes_of(pool)._workers}) == 4
        done = await run(store, *({} for _ in range(8)))
    assert {rollout.status for rollout in done} == {"succeeded"}
    return len((folder / "imports").read_text().splitlines())


async def test_an_agent_is_imported_once_for_all_workers_after_the_first(store: SqliteStore, tmp_path: Path):
    assert await import_counts(store, tmp_path) == 2


async def test_each_worker_imports_an_agent_for_itself_if_told_to(store: SqliteStore, tmp_path: Path):
    assert await import_counts(store, tmp_path, preload=False) == 4


@pytest.mark.parametrize(
    "more",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "file = open(__file__)",
        "import asyncio; loop = asyncio.new_event_loop()",
        "import subprocess; child = subprocess.Popen(['sleep', '600'])",
    ],
    ids=["thread", "file", "loop", "child"],
)
async def test_what_cannot_be_forked_is_imported_by_each(store: SqliteStore, tmp_path: Path, more: str):
    assert await import_counts(store, tmp_path, more) == 4


async def test_workers_draw_numbers_of_their_own(store: SqliteStore, tmp_path: Path):
    (tmp_path / "drawing_agent.py").write_text(
        "import numpy, os, time\n"
        "def agent(task, llm):\n"
        "    open(f'{task.data[\"folder\"]}/{os.getpid()}.there', 'w').close()\n"
        "    while len([f for f in os.listdir(task.data['folder']) if f.endswith('.there')]) < 4: time.sleep(0.01)\n"
        "    return {'numpy': numpy.random.random()}\n"
    )
    async with running(store, f"{tmp_path}/drawing_agent.py:agent", workers=4):
        done = await run(store, *({"folder": str(tmp_path)} for _ in range(4)))
    assert len({rollout.reward("numpy") for rollout in done}) == 4


async def test_a_new_process_that_workers_come_from_imports_it_too(store: SqliteStore, tmp_path: Path):
    (tmp_path / "counted_agent.py").write_text(IMPORTS.format(more="", number="0"))
    async with running(store, f"{tmp_path}/counted_agent.py:agent", workers=2) as pool:
        agent = processes_of(pool)
        process = agent._fork_server._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        agent._idle.clear()
        (done,) = await run(store, {})
    imports = (tmp_path / "imports").read_text().split()
    assert len(imports) == 3
    assert str(int(done.reward("process") or 0)) not in imports


# -- what agents print -------------------------------------------------------------------------------------------------


async def test_what_an_agent_prints_is_told_as_events_of_its_rollout(
    store: SqliteStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    log = tmp_path / "agents.log"
    async with running(store, log=log, workers=1):
        first, second = await run(store, {"do": "print", "text": "grüße"}, {"do": "return"})
    (event,) = await store.events(first.id)
    assert (event.kind, event.data["stream"]) == ("message", "output")
    assert event.data["text"] == "grüße\nand from its stderr\nan end without a line break"
    assert await store.events(second.id) == []
    assert log.read_text() == ""
    assert capfd.readouterr() == ("", "")


async def test_what_is_printed_outside_of_rollouts_goes_to_the_log(store: SqliteStore, tmp_path: Path):
    (tmp_path / "loud_agent.py").write_text("print('importing')\ndef agent(task, llm): return 1.0")
    async with running(store, f"{tmp_path}/loud_agent.py:agent", log=tmp_path / "log", workers=1):
        (done,) = await run(store, {})
    assert (tmp_path / "log").read_text() == "importing\n"
    assert await store.events(done.id) == []


async def test_the_last_words_of_an_agent_that_is_killed_are_told(store: SqliteStore):
    async with running(store, workers=2, timeout=2.0):
        died, hung = await run(store, {"do": "print_and_die"}, {"do": "print_and_hang"}, retries={})
    assert (died.cause, await printed(store, died.id)) == ("lost_runner", "last words\n")
    assert (hung.cause, await printed(store, hung.id)) == ("timeout", "waiting for nothing\n")


async def test_much_output_is_cut_and_says_so(store: SqliteStore):
    line = "x" * 99 + "\n"
    async with running(store, workers=1):
        (done,) = await run(store, {"do": "print_much", "line": line, "lines": 12_000})
    *events, last = await store.events(done.id)
    assert all(len(event.data["text"]) <= PIECE for event in events)
    assert all(event.data["text"].endswith("\n") for event in events[:-1])
    assert sum(len(event.data["text"]) for event in events) == KEPT
    assert last.data["dropped"] == 1_200_000 - KEPT
    assert f"{1_200_000 - KEPT} more bytes" in last.data["text"]


async def test_what_a_child_prints_too_late_gets_into_no_other_rollout(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "done"
    async with running(store, workers=1):
        (first,) = await run(store, {"do": "print_later", "file": str(file)})
        (second,) = await run(store, {"do": "until", "file": str(file)})
    assert await store.events(first.id) == await store.events(second.id) == []


async def test_a_worker_uses_its_files_again_unless_something_was_printed(store: SqliteStore):
    async with running(store, workers=1) as pool:
        folder = Path(str(pool._folder))

        async def files(task: dict[str, Any]) -> dict[str, int]:
            """What is there after another rollout, by name: each file's number on the disk."""
            (done,) = await run(store, task)
            assert done.status == "succeeded"
            return {file.name: file.inode() for file in os.scandir(folder) if file.is_file()}

        first = await files({"do": "return", "value": 1})
        assert sorted(Path(name).suffix for name in first) == [".json", ".out"]
        assert await files({"do": "return", "value": 2, "note": "x" * 500}) == first
        task = json.loads((folder / "1.json").read_bytes())
        assert task["data"]["note"] == "x" * 500
        after = await files({"do": "print", "text": "hello"})
        assert list(after) == ["1.json"], "what was printed was read, and taken away"
        assert (await files({"do": "return", "value": 3})).keys() == first.keys()
        assert json.loads((folder / "1.json").read_bytes())["data"] == {"do": "return", "value": 3}


def test_output_is_told_in_whole_lines_and_characters():
    def pieces(printed: bytes) -> list[str]:
        return list(output.take(bytearray(printed), last=True))

    lines = b"".join(b"%d " % n + b"x" * 1000 + b"\n" for n in range(50))
    found = pieces(lines)
    assert "".join(found).encode() == lines
    assert all(piece.endswith("\n") and len(piece) <= PIECE for piece in found)
    wide = "aü€😀" * 5000
    found = pieces(wide.encode())
    assert "".join(found) == wide
    assert all(PIECE - 4 < len(piece.encode()) <= PIECE for piece in found[:-1])
    broken = pieces(b"\x80" * 20_000)
    assert sum(map(len, broken)) == 20_000
    assert pieces(b"") == []
    assert pieces(b"a\0b") == ["a\ufffdb"]


async def test_what_a_stopped_agent_printed_is_not_told_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The store hangs: whoever stopped the agent is let go all the same."""
    monkeypatch.setattr(output, "LAST_WORDS", 0.2)
    said: list[str] = []

    async def say(kind: EventKind, data: dict[str, Any]) -> None:
        said.append(data["text"])
        await asyncio.sleep(600)

    agent = ProcessAgent(AGENT, RunnerConfig(workers=1), folder=str(tmp_path))
    await agent.start()
    (worker,) = agent._workers
    task = Task(id="t", data={"do": "print_and_hang"})
    lease = Lease(
        rollout=Rollout(id="g.0", group="g", member=0, task=task, created=0.0),
        attempt=Attempt(rollout="g.0", number=1, runner="r", key="secret-of-g0", started=0.0, lease_until=1.0),
    )
    job = Job(llm=LLM.at("http://127.0.0.1:9", lease, model="main"), seed=0, task_file=str(tmp_path / "task.json"))
    running = asyncio.create_task(agent.run(job, say))
    await written(Path(worker.file))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 30)
    assert said == ["waiting for nothing\n"]
    assert await worker.exit_code() == -signal.SIGKILL
    await agent.close()


# -- the reward function -----------------------------------------------------------------------------------------------


async def test_the_reward_function_runs_in_the_worker(store: SqliteStore):
    async with running(store, reward=f"{AGENTS}:judge", workers=1):
        (done,) = await run(store, {"do": "return", "value": 3})
    assert done.reward() == 30.0
    assert await printed(store, done.id) == "judging 3\n"


async def test_a_broken_reward_function_is_told_before_anything_begins(store: SqliteStore):
    with pytest.raises(AgentError, match="judgee"):
        async with running(store, reward=f"{AGENTS}:judgee"):
            pass


# -- what cannot be imported -------------------------------------------------------------------------------------------


@pytest.fixture
def start_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is told only when a start takes too long would never be told: the test would time out."""
    monkeypatch.setattr("strop.runners.python.START_LIMIT", 3600.0)


@pytest.mark.usefixtures("start_has_no_limit")
async def test_what_all_workers_need_and_cannot_import_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process that workers are forked from dies of it, before it has read that it should fork one."""
    (tmp_path / "openai.py").write_text("import no_such_package.of_openai\n")
    monkeypatch.syspath_prepend(tmp_path)
    agent = ProcessAgent(AGENT, RunnerConfig(workers=4), folder=str(tmp_path / "workers"), log=tmp_path / "log")
    with pytest.raises(AgentError) as raised:
        await agent.start()
    assert "ModuleNotFoundError: No module named 'no_such_package'" in str(raised.value)
    assert f"Fix: {sys.executable} -m pip install no_such_package" in str(raised.value)
    assert "runner.workers" not in str(raised.value)
    await agent.close()


@pytest.mark.usefixtures("start_has_no_limit")
async def test_an_environment_without_what_agents_need_is_told_of_at_once(tmp_path: Path):
    python = environment(tmp_path / "there")
    (packages,) = (tmp_path / "there").glob("lib/python*/site-packages")
    (packages / "openai.py").write_text("import no_such_package\n")
    agent = ProcessAgent(AGENT, RunnerConfig(workers=1, python=python), folder=str(tmp_path / "workers"))
    with pytest.raises(
        AgentError, match=rf"runner\.python: .* No module named 'no_such_package'.*Fix: {python} -m pip"
    ):
        await agent.start()
    await agent.close()


@pytest.mark.usefixtures("start_has_no_limit")
@pytest.mark.parametrize("agents_in", ["processes", "loops", "threads", "loop"])
async def test_an_agent_whose_framework_is_missing_says_how_to_get_it(
    store: SqliteStore, tmp_path: Path, agents_in: str
):
    file = tmp_path / f"graph_agent_{agents_in}.py"
    file.write_text("from no_such_framework.graphs import Graph\n\n\nasync def agent(task, llm):\n    return 1.0\n")
    with pytest.raises(AgentError) as raised:
        async with running(store, f"{file}:agent", workers=2, agents_in=agents_in):
            pass
    assert "No module named 'no_such_framework'" in str(raised.value)
    assert f"Fix: {sys.executable} -m pip install no_such_framework, or " in str(raised.value)
    assert "runner.python" in str(raised.value)


async def test_an_agent_that_imports_what_is_missing_while_it_runs_says_the_same(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "late_agent.py"
    file.write_text("def agent(task, llm):\n    import no_such_framework\n")
    async with running(store, f"{file}:agent", workers=1):
        (done,) = await run(store, {})
    assert done.cause == "agent_error"
    assert f"Fix: {sys.executable} -m pip install no_such_framework" in (done.detail or "").splitlines()[-1]


async def test_an_agent_that_is_no_python_names_its_line(store: SqliteStore, tmp_path: Path):
    file = tmp_path / "half_agent.py"
    file.write_text("def agent(task, llm):\n    return (1.0\n")
    with pytest.raises(AgentError, match=r"SyntaxError: .*half_agent\.py, line 2"):
        async with running(store, f"{file}:agent"):
            pass


# -- a parent that dies ------------------------------------------------------------------------------------------------

PROGRAM = """
    import asyncio, sys
    from strop.config import RunnerConfig
    from strop.runners.pool import Pool
    from strop.store.sqlite import SqliteStore
    from strop.types import Rollout, Task

    async def main():
        store = await SqliteStore.open(sys.argv[1])
        specs = {None: sys.argv[2], "other": sys.argv[2]}
        pool = Pool(store, specs, RunnerConfig(workers=4), gateway_url="http://127.0.0.1:9", model="main")
        await pool.start()
        pool.work()
        doing = [{"do": "spin"}, {"do": "daemon", "file": f"{sys.argv[3]}-daemon", "seconds": 600}]
        doing += [{"do": "child", "file": sys.argv[3]}]
        await store.enqueue([
            Rollout(id=f"g.{i}", group="g", member=i, created=0.0, task=Task(id="t", data=data))
            for i, data in enumerate(doing)
        ])
        while (await store.stats())["running"] < 3:
            await asyncio.sleep(0.1)
        agents = pool._agents.values()
        pids = [one._fork_server._process.pid for one in agents] + [w.pid for one in agents for w in one._workers]
        print(pool._folder, *pids, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())  # not guarded by __name__: workers must not run it again
"""


async def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path):
    program, file = tmp_path / "program.py", tmp_path / "child"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, program, tmp_path / "s.sqlite", AGENT, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        folder, *numbers = parent.stdout.readline().decode().split()
        pids = [int(number) for number in numbers]
        pids += [int(await written(file)), int(await written(tmp_path / "child-daemon"))]
        assert len(pids) == 12
        assert all(alive(pid) for pid in pids)
        assert os.path.isdir(folder)  # noqa: ASYNC240
        parent.kill()
        assert await eventually(lambda: not any(alive(pid) for pid in pids)), [pid for pid in pids if alive(pid)]
        assert not os.path.exists(folder)  # noqa: ASYNC240


def environment(folder: Path, *, empty: bool = False) -> str:
    """The Python of another environment, which has a module that this one has not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("def solve(task, llm):\n    import sys\n    return sys.prefix\n")
    if not empty:
        (packages / "ours.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    return str(folder / "bin" / "python")


async def test_agents_may_run_in_another_environment(store: SqliteStore, tmp_path: Path):
    python = environment(tmp_path / "there")
    judge = tmp_path / "judge.py"
    judge.write_text("import only_there\n\ndef score(task, answer):\n    return float(answer == task.data['prefix'])\n")
    async with running(store, "only_there:solve", reward=f"{judge}:score", workers=2, python=python):
        there, here = await run(store, {"prefix": str(tmp_path / "there")}, {"prefix": sys.prefix})
    assert (there.reward(), here.reward()) == (1.0, 0.0)


@pytest.mark.parametrize(("python", "said"), [("empty", "No module named 'msgspec'"), ("nowhere", "cannot be run")])
async def test_an_environment_that_cannot_run_agents_is_told_of(tmp_path: Path, python: str, said: str):
    place = environment(tmp_path / "empty", empty=True) if python == "empty" else str(tmp_path / "no" / "python")
    agent = ProcessAgent(AGENT, RunnerConfig(workers=1, python=place), folder=str(tmp_path))
    with pytest.raises(AgentError, match=rf"runner\.python: .*{said}"):
        await agent.start()
    await agent.close()
