"""Commands in bubblewrap's containers: real ones, that look for what they must not find."""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strop.config import ContainerConfig
from strop.errors import AgentError, ConfigError
from strop.net.process_group import find_leftovers
from strop.runners.command import CommandAgent
from strop.store.sqlite import SqliteStore
from strop.types import Reward
from tests.unit.runners.stand import alive, eventually, printed, run, running, written
from tests.unit.runners.test_command import Bench, shell

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed (make sandbox)")
PYTHON = "/usr/bin/python3"
SLEEP = f"sleep 1234.{os.getpid()}"
"""What is looked for among all processes of the machine."""
needs_python = pytest.mark.skipif(not Path(PYTHON).exists(), reason="there is no Python below /usr")


class Yard(Bench):
    """A bench whose commands are in containers, in the folder `agent` beside everything that they must not see."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.own = folder / "agent"
        self.own.mkdir()
        self.run_folder = self.own / "runs" / "mine"
        self.settings: dict[str, Any] = {}

    async def agent(self, command: str, reward: str = "") -> CommandAgent:
        config = ContainerConfig(runtime="bubblewrap", **self.settings)
        agent = CommandAgent(command, reward=reward, container=config, private=[self.run_folder])
        await agent.start()
        self.agents.append(agent)
        return agent

    async def says(self, line: str) -> str:
        """What a line of shell prints in there, with its errors."""
        self.said.clear()
        await self.run(shell(f"exec 2>&1; {line}"))
        return self.text("stdout")


@pytest.fixture
async def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Yard]:
    yard = Yard(tmp_path)
    monkeypatch.chdir(yard.own)
    yield yard
    for agent in yard.agents:
        await agent.close()
    assert find_leftovers(yard.key) == []


# -- what a command is promised -----------------------------------------------------------------------------------


@needs_python
async def test_the_task_the_addresses_and_the_reward(yard: Yard) -> None:
    code = """
    import json, os, sys
    assert json.load(sys.stdin) == json.load(open(os.environ["STROP_TASK"]))
    assert os.environ["OPENAI_BASE_URL"].endswith("/v1") and os.environ["OPENAI_API_KEY"]
    print("thinking", file=sys.stderr)
    print('{"reward": 0.5}')
    """
    (yard.own / "agent.py").write_text(textwrap.dedent(code))
    outcome = await yard.run(f"{PYTHON} agent.py", {"question": "wie spät?"})
    assert outcome.rewards == [Reward(value=0.5)], outcome
    assert not outcome.clean  # what else may have run in it died uncounted
    assert yard.text("stderr") == "thinking\n"


@pytest.mark.parametrize(
    ("line", "cause", "detail"),
    [
        ("echo oh no >&2; exit 3", "agent_error", "exit code 3: oh no"),
        ("exit 75", "lost_runner", "exit code 75 (it asks to be tried again)"),
        ("kill -9 $$", "lost_runner", "killed by SIGKILL"),
        ("kill -SEGV $$", "agent_error", "killed by SIGSEGV"),
        ("exit 0", None, None),
    ],
)
async def test_exit_codes_mean_what_they_mean_outside(
    yard: Yard, line: str, cause: str | None, detail: str | None
) -> None:
    outcome = await yard.run(shell(line))
    assert (outcome.cause, outcome.detail) == (cause, detail)


async def test_the_folder_that_is_named_is_all_it_sees(yard: Yard) -> None:
    """It runs there, and what lies beside it is not there."""
    (yard.own / "inside").mkdir()
    (yard.own / "inside" / "mine").write_text("seen")
    (yard.own / "hidden_tests").write_text("not seen")
    yard.settings = {"folder": "inside"}
    assert await yard.says("pwd; cat mine; echo; ls -A; ls -A ..; touch new") == (
        f"{yard.own}/inside\nseen\nmine\ninside\ntouch: cannot touch 'new': Read-only file system\n"
    )
    yard.settings = {"folder": "nowhere"}
    with pytest.raises(ConfigError, match=r"runner\.container\.folder: there is no folder nowhere\. Fix: "):
        await yard.agent("true")


async def test_a_daemon_ends_with_its_container(yard: Yard) -> None:
    outcome = await yard.run(shell(f"setsid env -i {SLEEP} & sleep 0.2; ps -eo args; echo 1"))
    assert outcome.rewards == [Reward(value=1.0)]
    assert f"\n{SLEEP}\n" in yard.text("stdout")
    assert SLEEP not in _command_lines()


async def test_one_that_is_stopped_leaves_nothing(yard: Yard) -> None:
    yard.settings = {"writable": True}
    agent = await yard.agent(shell(f"setsid {SLEEP} & echo started > started; {SLEEP}"))
    running = asyncio.create_task(agent.run(yard.job(), yard.say))
    await written(yard.own / "started")
    assert _command_lines().count(SLEEP) >= 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert SLEEP not in _command_lines()


async def test_a_time_limit_ends_all_of_it(yard: Yard, store: SqliteStore) -> None:
    config = ContainerConfig(runtime="bubblewrap")
    async with running(store, shell(f"setsid {SLEEP} & echo begun; {SLEEP}"), timeout=2.0, container=config):
        (rollout,) = await run(store, {"n": 1})
        assert (rollout.status, rollout.cause) == ("failed", "timeout")
        assert await printed(store, rollout.id) == "begun\n"
        assert SLEEP not in _command_lines()


async def test_the_network_is_the_machines(yard: Yard) -> None:
    heard = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (yard.own / "call.sh").write_text(f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo 1")
    assert (await yard.run("bash call.sh")).rewards == [Reward(value=1.0)]
    assert heard.is_set()
    server.close()


# -- what it must not find -------------------------------------------------------------------------------------------


async def test_files_of_runs_homes_and_other_rollouts_are_not_there(yard: Yard) -> None:
    other = yard.own / "runs" / "older"
    for folder in (yard.run_folder, other):
        folder.mkdir(parents=True)
        (folder / "store.sqlite").write_text("secret")
        (folder / "key").write_text("secret")
    (yard.folder / "2.json").write_text("another rollout's task")
    places = [
        yard.run_folder,
        other,
        yard.folder,
        Path.home(),
        Path("/root"),
        Path("/home"),
        Path("/var"),
        Path("/work"),
    ]
    for place in places:
        assert "secret" not in (said := await yard.says(f"ls -A {place}; cat {place}/key {place}/2.json")), said
        assert "another" not in said
        listed = await yard.says(f"ls -A {place} 2>/dev/null")
        assert listed in ("", "agent\n"), (place, listed)
    assert await yard.says("ls") == "runs\n"
    for file in ("/etc/shadow", "/etc/sudoers", "/etc/hostname"):
        assert "No such file" in await yard.says(f"cat {file}")
    assert await yard.says("ls -A /tmp /run") == f"/run:\nstrop\n\n/tmp:\n{yard.folder.parts[2]}\n"


async def test_a_folder_of_a_run_that_began_later_is_not_there_either(yard: Yard) -> None:
    agent = await yard.agent("cat runs/late/key")
    late = yard.own / "runs" / "late"
    late.mkdir(parents=True)
    (late / "store.sqlite").touch()
    (late / "key").write_text("secret")
    assert (await agent.run(yard.job(), yard.say)).cause == "agent_error"
    assert "secret" not in yard.text("stdout")


async def test_other_processes_are_not_there(yard: Yard) -> None:
    assert await yard.says("ls -d /proc/[0-9]* | wc -l") in [f"{count}\n" for count in range(2, 7)]
    assert "No such process" in await yard.says(f"kill -0 {os.getpid()}")
    assert str(os.getpid()) not in (await yard.says("echo /proc/[0-9]*")).replace("/proc/", "").split()


async def test_it_can_write_to_its_own_tmp_only(yard: Yard) -> None:
    (yard.own / "data").write_text("as it was")
    for place in (
        "data",
        "new",
        "/usr/new",
        "/new",
        "/etc/new",
        "/run/strop/task.json",
        "/dev/new",
        "/proc/sys/vm/laptop_mode",
    ):
        said = await yard.says(f"echo changed > {place} && echo written")
        assert "written" not in said, place
    assert (yard.own / "data").read_text() == "as it was"
    assert await yard.says("echo x > /tmp/file && cat $HOME/file $TMPDIR/file") == "x\nx\n"
    assert await yard.says("ls /tmp/file") != "/tmp/file\n"  # the next one has a /tmp of its own
    yard.settings = {"writable": True}
    assert await yard.says("echo changed > data && echo written") == "written\n"
    assert (yard.own / "data").read_text() == "changed\n"


async def test_variables_are_its_own_and_those_that_are_named(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "secret")
    monkeypatch.setenv("SEARCH_KEY", "for the agent")
    assert "SECRET_OF_MINE" not in await yard.says("env")
    yard.settings = {"environment": ("SEARCH_KEY",)}
    assert await yard.says('echo "$SEARCH_KEY, ${SECRET_OF_MINE-nothing}"') == "for the agent, nothing\n"


async def test_no_key_is_in_a_command_line(yard: Yard) -> None:
    yard.settings = {"writable": True}
    agent = await yard.agent(shell("echo > started; sleep 100"))
    running = asyncio.create_task(agent.run(yard.job(), yard.say))
    assert await eventually((yard.own / "started").exists, 30)
    assert yard.key not in _command_lines()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_it_has_no_powers_and_cannot_get_any(yard: Yard) -> None:
    assert "CapEff:\t0000000000000000" in await yard.says("cat /proc/self/status")
    assert "not permitted" in (await yard.says("unshare --user --map-root-user id; mount -t tmpfs none /tmp")).lower()


# -- limits ------------------------------------------------------------------------------------------------------------


@needs_python
async def test_too_much_memory_ends_it(yard: Yard) -> None:
    yard.settings = {"memory_mb": 64}
    code = "import time; held = b'x' * (300 << 20); time.sleep(60)"
    outcome = await yard.run(shlex.join([PYTHON, "-c", code]))
    assert outcome.cause == "lost_runner"
    assert outcome.detail == "it used more than 64 MB of memory (runner.container.memory_mb)"


async def test_too_many_processes_end_it(yard: Yard) -> None:
    yard.settings = {"processes": 8}
    outcome = await yard.run(shell("for n in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 99 & done; wait"))
    assert outcome.detail == "it had more than 8 processes and threads (runner.container.processes)"


async def test_files_in_tmp_are_limited(yard: Yard) -> None:
    yard.settings = {"disk_mb": 2}
    for place in ("/tmp", "/dev/shm"):
        assert "No space left" in await yard.says(f"head -c 5000000 /dev/zero > {place}/big")


RUNNER = """
import asyncio, os
from pathlib import Path
from strop.agent.llm import LLM
from strop.config import ContainerConfig
from strop.runners.base import Job
from strop.runners.command import CommandAgent
from strop.types import Task

async def main():
    agent = CommandAgent("sh -c 'setsid SLEEP & echo begun > started; SLEEP'",
        container=ContainerConfig(runtime="bubblewrap", writable=True))
    await agent.start()
    llm = LLM(base_url="http://127.0.0.1:9/r/g/1/agents/main/v1", api_key="k", trace_id="k", model="m",
        events_url="http://127.0.0.1:9/e", rollout="g", task=Task(id="t"))
    async def say(kind, data): pass
    await agent.run(Job(llm=llm, seed=1, task_file="../task.json"), say)

asyncio.run(main())
"""


async def test_it_dies_with_a_runner_that_is_killed(yard: Yard) -> None:
    runner = _start_runner()
    try:
        await written(yard.own / "started")
        assert _command_lines().count(SLEEP) >= 2
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert await eventually(lambda: SLEEP not in _command_lines(), 10)
    assert not alive(runner.pid)


# -- what cannot be ----------------------------------------------------------------------------------------------------


async def test_a_program_that_is_outside_is_refused_at_once(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = yard.folder / "programs"
    programs.mkdir()
    (programs / "solve").write_text("#!/bin/sh\necho 1\n")
    (programs / "solve").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(AgentError, match=r"no program 'solve' in its container \(outside of it, it is .*Fix: .*mounts"):
        await yard.agent("solve")
    yard.settings = {"mounts": (str(programs),)}
    assert (await yard.run("solve")).rewards == [Reward(value=1.0)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mounts": ("/nowhere",)}, "there is no /nowhere. Fix: check its name"),
        ({"mounts": ("/",)}, "the agent would see all of /, and with it the home. Fix: "),
        ({"environment": ("STROP_KEY",)}, "names STROP_KEY, which is not set, or kept from agents. Fix: "),
        ({"cpus": 1.0}, "bubblewrap cannot limit runner.container.cpus. Fix: "),
        ({"image": "python:3.12"}, "runner.container.image is for docker and podman"),
    ],
)
async def test_settings_that_cannot_be_are_one_sentence(
    yard: Yard, settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_KEY", "secret")
    yard.settings = settings
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        await yard.agent("true")


async def test_the_home_and_the_runs_folder_are_no_place_for_an_agent(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(yard.own))
    with pytest.raises(ConfigError, match="and with it the home"):
        await yard.agent("true")
    monkeypatch.undo()
    yard.run_folder.mkdir(parents=True)
    monkeypatch.chdir(yard.run_folder)
    with pytest.raises(ConfigError, match="which is in the run's folder"):
        await yard.agent("true")
    served = yard.folder / "served"
    served.mkdir(mode=0o700)
    (served / "lock").touch()
    monkeypatch.chdir(served)
    with pytest.raises(ConfigError, match=r"which holds a run\. Fix: "):
        await yard.agent("true")


def _start_runner() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUNNER.replace("SLEEP", SLEEP)], start_new_session=True)


def _command_lines() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
