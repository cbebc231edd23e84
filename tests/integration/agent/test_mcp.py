"""Real MCP servers in processes of their own, over stdio and HTTP: ones that answer, one that hangs, one that dies."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.agent.mcp import Server
from strop.agent.tool import Tool
from strop.errors import ConfigError, ToolError
from tests.limits import stretch
from tests.runs import alive, descendants

COMMAND = [sys.executable, str(Path(__file__).with_name("server.py"))]
ALL = ["add", "total", "picture", "fail", "hang", "die", "environment"]


@contextlib.contextmanager
def over_http() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, "the server never came up"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


def check(tools: dict[str, Tool]) -> None:
    assert list(tools) == ALL
    about = tools["add"].schema["function"]
    assert about["description"] == "Add two numbers."
    assert (list(about["parameters"]["properties"]), about["parameters"]["required"]) == (["a", "b"], ["a"])
    assert tools["add"].run_now('{"a": 41}').text == "42"
    assert json.loads(tools["total"].run_now('{"numbers": [1, 2]}').text) == {"total": 3}
    assert tools["picture"].run_now("{}").text == "4 bytes of image/png, which cannot be shown as text"
    failed = tools["fail"].run_now("{}")
    assert failed.wrong == "error"
    assert "no such thing" in failed.text
    assert "Traceback" not in failed.text
    wrong = tools["add"].run_now('{"a": "many"}')
    assert not wrong.ok
    assert "integer" in wrong.text
    assert tools["add"].run_now("[]").wrong == "arguments"


def test_over_stdio_in_a_sync_agent() -> None:
    before = set(descendants(os.getpid()))
    with Server(COMMAND, env={"MINE": "1"}) as tools:
        (started,) = set(descendants(os.getpid())) - before
        check(by_name(tools))
        seen = by_name(tools)["environment"].run_now("{}").text.split()
        assert "MINE" in seen
        assert not [name for name in seen if name.startswith(("OPENAI", "STROP", "PYTEST"))]
    assert not alive(started)
    closed = tools[0].run_now('{"a": 1}')
    assert closed.wrong == "error"
    assert "is closed" in closed.text


async def test_over_stdio_in_an_async_agent() -> None:
    async with Server(COMMAND, only=["add"]) as tools:
        assert [tool.name for tool in tools] == ["add"]
        assert (await tools[0].run('{"a": 2, "b": 3}')).text == "5"


def test_over_http() -> None:
    with over_http() as (url, process):
        with Server(url=url, headers={"x-mine": "1"}) as tools:
            check(by_name(tools))
        with Server(url=url, timeout=2) as tools:  # another session of the same server
            process.kill()
            process.wait()
            gone = by_name(tools)["add"].run_now('{"a": 1}')
            assert not gone.ok
            assert url in gone.text
        with pytest.raises(ToolError, match=f"the MCP server '{url}' is gone or refused"), Server(url=url, timeout=5):
            pass


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_a_call_that_is_never_answered_holds_nothing_up(how: str) -> None:
    with contextlib.ExitStack() as stack:
        where = {"url": stack.enter_context(over_http())[0]} if how == "http" else {"command": COMMAND}
        tools = by_name(stack.enter_context(Server(**where, timeout=1 if how == "http" else 20)))  # type: ignore[arg-type]
        tools["hang"].timeout = 0.5
        began = time.monotonic()
        result = tools["hang"].run_now("{}")
        assert (result.wrong, result.text) == ("timeout", "error: hang did not end within 0.5 s")
        assert time.monotonic() - began < stretch(5)
        assert tools["add"].run_now('{"a": 1}').text == "2"  # the server is well


def test_a_server_that_dies_in_a_call_is_that_calls_result() -> None:
    with Server(COMMAND) as found:
        tools = by_name(found)
        began = time.monotonic()
        died = tools["die"].run_now("{}")
        assert time.monotonic() - began < stretch(10)
        assert died.wrong == "error"
        assert died.text.startswith("error: the MCP server")
        assert "it said last: a meteorite" in died.text
        assert "\n" not in died.text
        again = tools["add"].run_now('{"a": 1}')
        assert again.wrong == "error"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([*COMMAND, "silent"], "did not answer within 1 s"),
        ([*COMMAND, "broken"], "is gone or refused: .*; it said last: cannot find my settings"),
        (["/no/such/program"], "is gone or refused: FileNotFoundError"),
    ],
)
async def test_one_that_cannot_be_had_is_one_sentence(command: list[str], says: str) -> None:
    timeout = 1 if command[-1] == "silent" else 30
    threads = threading.active_count()
    with pytest.raises(ToolError, match=says) as refused, Server(command, timeout=timeout):
        pass
    assert "\n" not in str(refused.value)
    with pytest.raises(ToolError, match=says):
        async with Server(command, timeout=timeout):
            pass
    assert threading.active_count() <= threads + 1  # asyncio keeps one for its own use


def test_what_is_asked_for_wrongly() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        Server()
    with pytest.raises(ToolError, match="has no tool nothing: it has add, total"), Server(COMMAND, only=["nothing"]):
        pass
