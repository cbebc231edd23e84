"""Containers of docker and podman, against a recorded stand-in for their clients (`recorded_engine`): there is no
engine where the tests run. It is checked what one would be asked, and what becomes of containers; not the isolation."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strop.config import ContainerConfig
from strop.errors import ConfigError
from strop.runners.command import CommandAgent
from strop.runners.containers.choose import choose
from strop.types import Reward
from tests.unit.runners.stand import alive, eventually, written
from tests.unit.runners.test_command import Bench, shell

STAND_IN = Path(__file__).with_name("recorded_engine.py")


class Yard(Bench):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.own = folder / "agent, its own"
        self.engine = folder / "engine"
        self.settings: dict[str, Any] = {}
        self.client = "docker"
        self.own.mkdir()
        self.engine.mkdir()
        (self.engine / "up").touch()

    async def agent(self, command: str, reward: str = "") -> CommandAgent:
        config = ContainerConfig(**{"runtime": self.client, "image": "agents:1"} | self.settings)  # pyright: ignore
        agent = CommandAgent(command, reward=reward, container=config, private=[self.own / "runs" / "mine"])
        await agent.start()
        self.agents.append(agent)
        return agent

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self.engine / "calls").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words[0] == verb]


@pytest.fixture
async def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Yard]:
    yard = Yard(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("docker", "podman"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{STAND_IN}" "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORDED_ENGINE", str(yard.engine))
    monkeypatch.chdir(yard.own)
    yield yard
    for agent in yard.agents:
        await agent.close()


async def test_what_an_engine_is_asked_to_run(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder, data = yard.own / "runs" / "mine", yard.folder / "data"
    run_folder.mkdir(parents=True)
    data.mkdir()
    monkeypatch.setenv("SEARCH_KEY", "for the agent")
    yard.settings = {"mounts": (f"{data}:rw",), "environment": ("SEARCH_KEY",), "cpus": 1.5, "memory_mb": 300}
    outcome = await yard.run(shell("cat >&2; echo 0.5"), {"question": "?"})
    assert outcome.rewards == [Reward(value=0.5)], outcome
    assert '"question":"?"' in yard.text("stderr")
    (words,) = yard.calls("run")
    name = words[words.index("--name") + 1]
    assert name.startswith("strop-")
    said = " ".join(words)
    for option in (
        f"run --rm --interactive --init --name {name} --pull never --network host --log-driver none --read-only",
        "--cap-drop ALL --security-opt no-new-privileges --security-opt label=disable",
        f"--user {os.geteuid()}:{os.getegid()}",
        "--memory 300m --memory-swap 300m --pids-limit 512 --cpus 1.5",
        "--tmpfs /tmp:rw,exec,nosuid,nodev,size=512m,mode=1777",
        f'--mount type=bind,"source={yard.own}","target={yard.own}",readonly --mount',
        f"--mount type=bind,source={data},target={data} --mount",
        f'--mount type=tmpfs,"target={run_folder}",tmpfs-size=4096,tmpfs-mode=0555',
        f"--mount type=bind,source={yard.folder}/task.json,target=/run/strop/task.json,readonly",
        f"--workdir {yard.own}",
        "--env HOME=/tmp --entrypoint sh agents:1 -c",
    ):
        assert option in said, option
    assert yard.key not in said
    assert "for the agent" not in said
    assert {"OPENAI_API_KEY", "OPENAI_BASE_URL", "SEARCH_KEY", "STROP_TASK"} <= set(words)  # after --env
    environment = json.loads((yard.engine / "environment").read_text())
    assert environment["STROP_TASK"] == "/run/strop/task.json"
    assert environment["OPENAI_BASE_URL"] == yard.job().llm.base_url
    assert yard.calls("rm") == []  # it ended by itself, and --rm removes it


@pytest.mark.skipif(os.geteuid() == 0, reason="podman is rootless for ordinary users only")
async def test_rootless_podman_keeps_the_user(yard: Yard) -> None:
    yard.client = "podman"
    await yard.run("true")
    (words,) = yard.calls("run")
    assert "--userns keep-id" in " ".join(words)


async def test_podman_is_asked_the_same(yard: Yard) -> None:
    yard.client = "podman"
    assert (await yard.run(shell("echo 1"))).rewards == [Reward(value=1.0)]
    assert "--network host" in " ".join(yard.calls("run")[0])


@pytest.mark.parametrize(
    ("line", "cause", "detail"),
    [
        ("echo no >&2; exit 3", "agent_error", "exit code 3: no"),
        ("kill -9 $$", "lost_runner", "killed by SIGKILL"),
        ("exit 75", "lost_runner", "exit code 75 (it asks to be tried again)"),
    ],
)
async def test_exit_codes(yard: Yard, line: str, cause: str, detail: str) -> None:
    outcome = await yard.run(shell(line))
    assert (outcome.cause, outcome.detail) == (cause, detail)


async def test_an_engine_that_goes_away_is_a_lost_runner(yard: Yard) -> None:
    agent = await yard.agent("true")
    (yard.engine / "up").unlink()
    outcome = await agent.run(yard.job(), yard.say)
    assert outcome.cause == "lost_runner"
    assert outcome.detail is not None
    assert "Cannot connect to the Docker daemon" in outcome.detail


async def test_a_container_that_is_stopped_is_removed(yard: Yard) -> None:
    agent = await yard.agent(shell(f"echo $$ > '{yard.folder}/pid'; exec sleep 1000"))
    running = asyncio.create_task(agent.run(yard.job(), yard.say))
    pid = int(await written(yard.folder / "pid"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    name = yard.calls("run")[0][yard.calls("run")[0].index("--name") + 1]
    assert yard.calls("rm") == [["rm", "--force", name]]
    assert await eventually(lambda: not alive(pid))


RUNNER = """
import asyncio, sys
from strop.agent.llm import LLM
from strop.config import ContainerConfig
from strop.runners.base import Job
from strop.runners.command import CommandAgent
from strop.types import Task

async def main():
    agent = CommandAgent(sys.argv[1], container=ContainerConfig(runtime="docker", image="agents:1"))
    await agent.start()
    llm = LLM(base_url="http://127.0.0.1:9/r/g/1/agents/main/v1", api_key="k", trace_id="k", model="m",
        events_url="http://127.0.0.1:9/e", rollout="g", task=Task(id="t"))
    async def say(kind, data): pass
    await agent.run(Job(llm=llm, seed=1, task_file="../task.json"), say)

asyncio.run(main())
"""


async def test_containers_of_a_runner_that_is_killed_are_removed(yard: Yard) -> None:
    line = shell(f"echo $$ > '{yard.folder}/pid'; exec sleep 1000")
    runner = _start_runner(line)
    pid = int(await written(yard.folder / "pid"))
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert await eventually(lambda: not alive(pid), 20)
    assert await eventually(lambda: yard.calls("rm"), 20)


async def test_a_client_without_an_engine_is_not_taken(yard: Yard) -> None:
    (yard.engine / "up").unlink()
    assert (await choose(ContainerConfig(runtime="auto", image="agents:1"))).title == "bubblewrap"
    assert [words[0] for words in map(json.loads, (yard.engine / "calls").read_text().splitlines())] != []
    with pytest.raises(ConfigError, match=r"docker is not installed, or its engine does not answer\. Fix: "):
        await yard.agent("true")
    (yard.engine / "up").touch()
    assert (await choose(ContainerConfig(runtime="auto", image="agents:1"))).title == "docker"


async def test_the_real_client_of_this_machine_is_not_taken_either(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("docker") is None or (await asyncio.to_thread(_has_engine)):
        pytest.skip("there is no docker here, or one with an engine")
    assert (await choose(ContainerConfig(runtime="auto"))).title == "bubblewrap"


def _start_runner(line: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUNNER, line], start_new_session=True)


def _has_engine() -> bool:
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"image": ""}, "docker needs an image to run the agent in. Fix: set runner.container.image, or"),
        ({"image": "", "runtime": "auto"}, "docker needs an image to run the agent in. Fix: "),
        ({"image": "missing"}, "docker has no image 'missing'. Fix: docker pull missing"),
    ],
)
async def test_an_image_that_is_not_there(yard: Yard, settings: dict[str, Any], says: str) -> None:
    yard.settings = settings
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        await yard.agent("true")
