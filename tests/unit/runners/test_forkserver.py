"""The process that workers are forked from, killed at bad moments."""

import asyncio
import signal
from pathlib import Path

import pytest

from strop.errors import AgentError
from strop.net.secrets import child_environment
from strop.runners.forkserver import KILLS, MAX_ASKED, STARTS, ForkServer


async def kill_starts(server: ForkServer, count: int) -> None:
    """Kill the process each time that it is started, `count` times."""
    killed = None
    for _ in range(count):
        while server._process is None or server._process is killed:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        killed = server._process
        killed.kill()


async def test_killed_while_it_starts_it_is_started_again(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "log", str(tmp_path / "folder"), child_environment())
    _, (worker, connection) = await asyncio.gather(kill_starts(server, STARTS), server.fork())
    connection.close()
    assert worker.pid > 0
    await server.close()


async def test_one_that_dies_by_itself_is_not_tried_for_long(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho start >> {tmp_path}/starts\nexit 3\n")
    python.chmod(0o755)
    server = ForkServer(tmp_path / "log", str(tmp_path / "folder"), child_environment(), str(python))
    with pytest.raises(AgentError, match="the process that starts agents died: look into"):
        await server.fork()
    assert (tmp_path / "starts").read_text() == "start\n" * STARTS
    await server.close()


async def test_one_that_is_always_killed_is_told(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "log", str(tmp_path / "folder"), child_environment())
    killing = asyncio.create_task(kill_starts(server, KILLS))
    with pytest.raises(AgentError, match="the process that starts agents died: look into"):
        await server.fork()
    await killing
    await server.close()


async def test_what_agents_started_does_not_outlive_one_that_was_killed(tmp_path: Path) -> None:
    """It is above nothing any more: what was started below it is found by its environment."""
    server = ForkServer(tmp_path / "log", str(tmp_path / "folder"), child_environment())
    _, connection = await server.fork()
    left = await asyncio.create_subprocess_exec("sleep", "600", env=server._environment, start_new_session=True)
    assert server._process is not None
    server._process.kill()
    connection.close()
    await server.close()
    assert await asyncio.wait_for(left.wait(), 20) == -signal.SIGKILL


async def test_many_workers_are_asked_for_at_once(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "log", str(tmp_path / "folder"), child_environment())
    found = await asyncio.gather(*(server.fork() for _ in range(3 * MAX_ASKED)))
    assert len({worker.pid for worker, _ in found}) == 3 * MAX_ASKED
    for _, connection in found:
        connection.close()
    ends = await asyncio.wait_for(asyncio.gather(*(worker.end for worker, _ in found)), 60)
    assert set(ends) == {-signal.SIGKILL}  # each by itself, when its connection closed
    await server.close()
