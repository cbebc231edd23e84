"""Agents that are commands: real programs, in several languages."""

import asyncio
import json
import os
import secrets
import shlex
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from strop.agent.llm import LLM
from strop.errors import AgentError, Fenced
from strop.net.process_group import find_leftovers
from strop.runners.base import Job, Outcome, Say
from strop.runners.command import CommandAgent
from strop.runners.output import KEPT, PIECE
from strop.types import EventKind, Reward, Task

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="daemons are found in /proc")


@pytest.fixture(scope="module", params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


class Bench:
    """Runs commands one after the other and keeps what they said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = secrets.token_hex(16)
        self.said: list[dict[str, Any]] = []
        self.agents: list[CommandAgent] = []

    def job(self, data: Any = None) -> Job:
        base = "http://127.0.0.1:9/r/g1.0/2"
        llm = LLM(
            base_url=f"{base}/agents/main/v1",
            api_key=self.key,
            trace_id=self.key,
            model="main",
            events_url=f"{base}/events",
            rollout="g1.0",
            task=Task(id="t", data=data),
        )
        return Job(llm=llm, seed=5, task_file=str(self.folder / "task.json"))

    async def say(self, kind: EventKind, data: dict[str, Any]) -> None:
        assert kind == "message"
        await asyncio.sleep(0)
        self.said.append(data)

    def text(self, stream: str) -> str:
        return "".join(data["text"] for data in self.said if data["stream"] == stream and "dropped" not in data)

    async def agent(self, command: str, reward: str = "") -> CommandAgent:
        agent = CommandAgent(command, reward=reward)
        await agent.start()
        self.agents.append(agent)
        return agent

    async def run(self, command: str, data: Any = None, *, reward: str = "", say: Say | None = None) -> Outcome:
        return await asyncio.wait_for((await self.agent(command, reward)).run(self.job(data), say or self.say), 60)

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for agent in bench.agents:
        await agent.close()
    assert find_leftovers(bench.key) == []


def python(code: str, *arguments: object) -> str:
    return shlex.join([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)])


def shell(line: str) -> str:
    return shlex.join(["sh", "-c", line])


# -- what goes in ----------------------------------------------------------------------------------------------------


async def test_the_task_comes_on_stdin_and_as_a_file(bench: Bench) -> None:
    task = {"id": "t", "split": "train", "data": {"question": "wie spät?"}, "agent": None}
    for read in ("sys.stdin", "open(os.environ['STROP_TASK'])"):
        code = f"import json, os, sys; assert json.load({read}) == {task!r}; print(0.5)"
        outcome = await bench.run(python(code), {"question": "wie spät?"})
        assert outcome == Outcome(rewards=[Reward(value=0.5)]), outcome


async def test_the_environment_has_the_addresses_and_what_was_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    await bench.run(python("import json, os; print(json.dumps(dict(os.environ)))"))
    seen = json.loads(bench.text("stdout"))
    assert seen | bench.job().llm.environment(str(bench.folder / "task.json")) == seen
    assert seen["OPENAI_API_KEY"] == bench.key
    assert (seen["MINE"], seen["NO_PROXY"]) == ("1", "example.org,127.0.0.1")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
async def test_an_agent_in_javascript(bench: Bench) -> None:
    path = bench.file(
        "agent.js",
        """
        let text = "";
        process.stdin.on("data", (part) => (text += part));
        process.stdin.on("end", () => {
          const task = JSON.parse(text);
          console.error("solving " + task.data.question);
          const right = task.data.answer === 12 && process.env.OPENAI_BASE_URL.endsWith("/v1");
          console.log(JSON.stringify({ reward: right ? 1 : 0 }));
        });
        """,
    )
    outcome = await bench.run(f"node {path}", {"question": "3 * 4", "answer": 12})
    assert outcome == Outcome(rewards=[Reward(value=1.0)])
    assert bench.text("stderr") == "solving 3 * 4\n"


async def test_a_program_that_does_not_read_its_input(bench: Bench) -> None:
    big = "x" * 1_000_000
    assert (await bench.run(shell("exec <&-; sleep 0.2; echo 1"), big)).rewards == [Reward(value=1.0)]
    assert (await bench.run("true", big)) == Outcome()


# -- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "rewards"),
    [
        ("thinking\\n0.5\\n\\n  \\n", [Reward(value=0.5)]),
        ("true", [Reward(value=1.0)]),
        ('{"reward": 1, "format": 0.25}', [Reward(value=1.0), Reward(name="format", value=0.25)]),
        ('[{"name": "style", "value": 1, "agent": "writer"}]', [Reward(name="style", value=1.0, agent="writer")]),
        ("", []),
        ("null", []),
        ('"0.5"', []),
        ("The answer is 12.", []),
        ("12 apples", []),
        ('{"answer": "12"}', []),
        ("[1, 2]", []),
    ],
)
async def test_the_last_line_is_the_reward_if_it_looks_like_one(
    bench: Bench, printed: str, rewards: list[Reward]
) -> None:
    path = bench.file("printed", printed.replace("\\n", "\n"))
    assert await bench.run(f"cat {path}") == Outcome(rewards=rewards)


async def test_a_last_line_that_only_looks_like_json(bench: Bench) -> None:
    for line in ("[" * 100_000, "1" * 100_000, '{"reward": 1'):
        assert await bench.run(f"cat {bench.file('printed', line)}") == Outcome()


async def test_a_bad_reward_is_refused(bench: Bench) -> None:
    outcome = await bench.run("echo NaN")
    assert (outcome.cause, outcome.rewards) == ("bad_reward", [])
    assert outcome.detail is not None
    assert "is nan" in outcome.detail


async def test_a_reward_function_gets_the_answer(bench: Bench) -> None:
    path = bench.file(
        "judge_of_test_command.py",
        """
        def judge(task, answer):
            return answer == task.data
        def fails(task, answer):
            raise ValueError("cannot judge this")
        """,
    )
    for printed, answer in (("a\n\nb\n", "a\n\nb"), ('first\n{"x": [1]}\n', {"x": [1]}), ("", ""), ("0.5", 0.5)):
        bench.file("printed", printed)
        outcome = await bench.run(f"cat {bench.folder}/printed", answer, reward=f"{path}:judge")
        assert outcome == Outcome(rewards=[Reward(value=1.0)]), printed
    outcome = await bench.run("echo 1", reward=f"{path}:fails")
    assert outcome.cause == "agent_error"
    assert outcome.detail is not None
    assert outcome.detail.startswith("the reward function failed: ")


@pytest.mark.parametrize(
    ("line", "cause", "detail"),
    [
        ("echo 1; echo first >&2; echo oh no >&2; exit 3", "agent_error", "exit code 3: first\noh no"),
        ("echo only this; exit 1", "agent_error", "exit code 1: only this"),
        ("exit 2", "agent_error", "exit code 2"),
        ("exit 127", "agent_error", "exit code 127 (a program that it calls was not found)"),
        ("exit 126", "agent_error", "exit code 126 (a program that it calls cannot be executed)"),
        ("exit 75", "lost_runner", "exit code 75 (it asks to be tried again)"),
        ("exit 137", "lost_runner", "exit code 137 (killed by SIGKILL)"),
        ("kill -9 $$", "lost_runner", "killed by SIGKILL"),
        ("kill -SEGV $$", "agent_error", "killed by SIGSEGV"),
        ("kill -TERM $$", "agent_error", "killed by SIGTERM"),
    ],
)
async def test_how_it_ended_decides_what_it_came_to(bench: Bench, line: str, cause: str, detail: str) -> None:
    outcome = await bench.run(shell(line))
    assert (outcome.cause, outcome.detail, outcome.rewards) == (cause, detail, [])
    assert outcome.clean


async def test_a_long_complaint_keeps_its_end(bench: Bench) -> None:
    outcome = await bench.run(python("import sys; sys.exit('x\\n' * 5000 + 'y' * 5000 + ' the end')"))
    assert outcome.detail is not None
    assert len(outcome.detail) < 3000
    assert outcome.detail.endswith("y the end")


async def test_output_becomes_events_while_the_program_runs(bench: Bench) -> None:
    """The program waits for what we do once we have heard it."""
    code = f"""
    import os, sys, time
    print("one"); print("two"); sys.stdout.write("thr"); sys.stdout.flush()
    print("problem", file=sys.stderr)
    while not os.path.exists({str(bench.folder / "heard")!r}): time.sleep(0.02)
    print("ee")
    """
    heard: list[dict[str, Any]] = []

    async def say(kind: EventKind, data: dict[str, Any]) -> None:
        heard.append(data)
        if len({data["stream"] for data in heard}) == 2:
            (bench.folder / "heard").touch()

    assert await bench.run(python(code), say=say) == Outcome()
    out = [data["text"] for data in heard if data["stream"] == "stdout"]
    assert "".join(out) == "one\ntwo\nthree\n"
    assert len(out) >= 2
    assert all(text.endswith("\n") for text in out)
    assert {"stream": "stderr", "text": "problem\n"} in heard


async def test_events_are_whole_lines_and_not_too_large(bench: Bench) -> None:
    printed = "".join(f"{number:05d} {'é' * 40}\n" for number in range(1000)) + "ü" * 3 * PIECE + "\nend"
    path = bench.file("printed", printed)
    await bench.run(f"cat {path}")
    assert bench.text("stdout") == printed
    pieces = [data["text"].encode() for data in bench.said]
    assert all(len(piece) <= PIECE for piece in pieces)
    assert all(piece.endswith(b"\n") for piece in pieces[:8])
    assert len(pieces) < 30


async def test_too_much_output_is_cut_and_counted_but_read_to_its_end(bench: Bench) -> None:
    code = """
    import sys
    for number in range(50):
        sys.stdout.write("x" * 99_999 + "\\n")
        sys.stderr.write("small\\n")
    print('{"reward": 0.75}')
    """
    outcome = await bench.run(python(code))
    assert outcome == Outcome(rewards=[Reward(value=0.75)])
    assert len(bench.text("stdout")) == KEPT
    assert bench.text("stderr") == "small\n" * 50
    dropped = 5_000_000 + len('{"reward": 0.75}\n') - KEPT
    assert [data for data in bench.said if "dropped" in data] == [
        {"stream": "stdout", "text": f"... {dropped} more bytes were printed and are not kept", "dropped": dropped}
    ]


async def test_binary_output_is_text_with_marks(bench: Bench) -> None:
    code = r"import os; os.write(1, b'a\x00b\xff\xfe\xe2\x82\n' + bytes(range(128, 256)) * 200 + b'\xe2')"
    assert (await bench.run(python(code))) == Outcome()
    said = bench.text("stdout")
    assert said.startswith("a\ufffdb\ufffd\ufffd\ufffd\n")
    assert said.endswith("\ufffd")
    assert "\0" not in said
    said.encode()  # it can be written down


# -- how it ends -----------------------------------------------------------------------------------------------------

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
print(1.0)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def until(path: Path) -> str:
    async with asyncio.timeout(30):
        while not path.exists() or not path.read_text():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
    return path.read_text()  # noqa: ASYNC240


@needs_proc
async def test_a_daemon_it_left_behind_is_killed(bench: Bench) -> None:
    """It holds stdout open, too: the end of the output must not be waited for."""
    outcome = await bench.run(python(DAEMON, bench.folder / "pid"))
    assert outcome == Outcome(rewards=[Reward(value=1.0)], clean=False)
    assert not alive(int(await until(bench.folder / "pid")))


@needs_proc
async def test_a_child_in_the_background_is_killed(bench: Bench) -> None:
    outcome = await bench.run(shell(f"env -i sleep 600 & echo $! > {bench.folder}/pid; echo 1"))
    assert outcome == Outcome(rewards=[Reward(value=1.0)], clean=False)
    assert not alive(int(await until(bench.folder / "pid")))


@needs_proc
async def test_cancelling_kills_everything_first(bench: Bench) -> None:
    agent = await bench.agent(python(DAEMON + "print('waiting', flush=True); time.sleep(600)", bench.folder / "pid"))
    running = asyncio.create_task(agent.run(bench.job(), bench.say))
    daemon = int(await until(bench.folder / "pid"))
    assert len(find_leftovers(bench.key)) >= 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(daemon)
    assert find_leftovers(bench.key) == []


async def test_a_timeout_is_a_cancellation_and_the_last_words_are_kept(bench: Bench) -> None:
    agent = await bench.agent(shell(f"echo half way; touch {bench.folder}/x; echo 1 > {bench.folder}/x; sleep 600"))
    running = asyncio.create_task(agent.run(bench.job(), bench.say))
    await until(bench.folder / "x")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running, 0.05)
    assert bench.text("stdout") == "half way\n"


async def test_cancelling_twice_changes_nothing(bench: Bench) -> None:
    agent = await bench.agent(shell(f"echo 1 > {bench.folder}/x; trap '' TERM INT; sleep 600; sleep 600"))
    running = asyncio.create_task(agent.run(bench.job(), bench.say))
    await until(bench.folder / "x")
    for _ in range(5):
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert find_leftovers(bench.key) == []


async def test_an_attempt_that_is_over_ends_its_program(bench: Bench) -> None:
    async def refuse(kind: EventKind, data: dict[str, Any]) -> None:
        raise Fenced("attempt 2 of g1.0 has ended")

    with pytest.raises(Fenced):
        await bench.run(shell("echo hello; sleep 600"), say=refuse)
    assert find_leftovers(bench.key) == []
    with pytest.raises(Fenced):  # said when it has ended already
        await bench.run("echo hello", say=refuse)


async def test_closing_ends_what_runs(bench: Bench) -> None:
    agent = await bench.agent(shell(f"echo 1 > {bench.folder}/x; sleep 600"))
    running = asyncio.create_task(agent.run(bench.job(), bench.say))
    await until(bench.folder / "x")
    await agent.close()
    outcome = await asyncio.wait_for(running, 30)
    assert (outcome.cause, outcome.detail) == ("lost_runner", "killed by SIGKILL")


def test_leaving_the_loop_ends_what_runs(tmp_path: Path) -> None:
    """As `asyncio.run` does it: every task is cancelled, in the midst of killing too."""
    bench = Bench(tmp_path)

    async def leave() -> CommandAgent:
        agent = await bench.agent(shell(f"echo 1 > {tmp_path}/x; sleep 600"))
        running = [asyncio.create_task(agent.run(bench.job(), bench.say)) for _ in range(2)]
        await until(tmp_path / "x")
        running[0].cancel()
        await asyncio.sleep(0.005)
        return agent

    agent = asyncio.run(leave())
    assert find_leftovers(bench.key) == []
    asyncio.run(agent.close())


async def test_many_at_once(bench: Bench) -> None:
    agent = await bench.agent("cat")
    jobs = []
    for number in range(40):  # each with a key of its own, as attempts have
        bench.key = secrets.token_hex(16)
        jobs.append(bench.job(number))
    outcomes = await asyncio.gather(*(agent.run(job, bench.say) for job in jobs))
    assert all(outcome.cause is None and outcome.clean for outcome in outcomes)
    said = [json.loads(data["text"])["data"] for data in bench.said]
    assert sorted(said) == list(range(40))


async def test_nothing_of_ours_is_left_open(bench: Bench) -> None:
    if not Path("/proc/self/fd").exists():  # noqa: ASYNC240
        pytest.skip("needs /proc")
    agent = await bench.agent("echo 1")
    await agent.run(bench.job(), bench.say)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await agent.run(bench.job(), bench.say)
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "the command is empty"),
        ("echo 'half", "cannot be split into words: No closing quotation"),
        ("no-such-program --fast", r"no program 'no-such-program'\. Fix: check its name and \$PATH, or write sh -c"),
        ("cd there && node agent.js", "no program 'cd'"),
        ("./no/such/file", "no program './no/such/file'"),
        ("{folder}/agent.sh", r"cannot be executed: chmod \+x .*/agent\.sh"),
        ("agent.sh", r"cannot be executed: write \./agent\.sh"),
    ],
)
async def test_a_command_that_cannot_be_is_refused_with_the_way_out(
    bench: Bench, command: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("cd") and shutil.which("cd"):
        pytest.skip("here cd is a program")
    bench.file("agent.sh", "echo 1")
    monkeypatch.chdir(bench.folder)
    with pytest.raises(AgentError, match=says):
        await bench.agent(command.format(folder=bench.folder))


async def test_a_reward_function_that_cannot_be_had_is_found_at_the_start(bench: Bench) -> None:
    with pytest.raises(AgentError, match=r"^reward: "):
        await bench.agent("true", reward="no_such_module:judge")


async def test_a_program_that_vanished_since_the_start(bench: Bench) -> None:
    program = bench.file("agent.sh", "#!/bin/sh\necho 1\n")
    program.chmod(0o755)
    agent = await bench.agent(str(program))
    assert (await agent.run(bench.job(), bench.say)).rewards == [Reward(value=1.0)]
    program.unlink()
    outcome = await agent.run(bench.job(), bench.say)
    assert outcome.cause == "agent_error"
    assert outcome.detail == f"{program} could not be started: No such file or directory"


async def test_a_task_file_that_cannot_be_written_is_the_runners_fault_or_ours(bench: Bench) -> None:
    agent = await bench.agent("true")
    job = bench.job()
    os.mkdir(job.task_file)  # as an agent before it may have left it
    assert (await agent.run(job, bench.say)).cause is None
    gone = msgspec.structs.replace(job, task_file=f"{job.task_file}/gone/task.json")
    outcome = await agent.run(gone, bench.say)
    assert outcome.cause == "agent_error"
    assert outcome.detail is not None
    assert "could not be started" in outcome.detail
